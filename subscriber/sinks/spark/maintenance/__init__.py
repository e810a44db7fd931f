"""Upkeep of a lake: the change log, and removal of files that are no longer needed."""
