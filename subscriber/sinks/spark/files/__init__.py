"""Files of a lake: where it is, how files are written durably, JSON documents, and locks."""
