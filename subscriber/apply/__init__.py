"""Policy: the apply loop, table synchronization, retry, spool."""
