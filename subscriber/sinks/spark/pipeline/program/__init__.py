"""Runs the applier as a program or a thread, in a loop, and registers what it publishes."""
