"""What a lake knows of its subscription: definition, tables, positions, published snapshots and status."""
