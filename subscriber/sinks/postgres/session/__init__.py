"""Sessions with the target: how they connect, their settings, locks, errors and replication origins."""
