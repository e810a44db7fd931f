"""Parallel apply of streamed transactions."""
