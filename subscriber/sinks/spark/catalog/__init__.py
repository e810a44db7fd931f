"""The catalog of a lake: definition of the subscription, tables, positions, published snapshots and status."""
