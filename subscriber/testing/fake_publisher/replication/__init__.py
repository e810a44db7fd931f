"""The walsender: replication commands, slots, snapshots, the WAL and its decoding, and the feedback of subscribers."""
