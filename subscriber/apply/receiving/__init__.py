"""Receiving: the stream, feedback, and the spool."""
