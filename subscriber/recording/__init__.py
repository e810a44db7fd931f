"""Recordings: the raw replication stream in a file, with timing and feedback, to be decoded or applied later."""
