"""Maintenance of a lake: the change log, and the removal of files that are no longer needed."""
