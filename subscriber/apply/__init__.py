"""The apply worker, table synchronization, retries and the spool."""
