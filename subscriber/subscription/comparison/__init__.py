"""Compare the tables of a running subscription with the publisher's, both as of one LSN: ``verify``, and the same in the background."""
