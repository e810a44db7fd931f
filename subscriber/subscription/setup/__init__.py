"""What happens before a run: checks, the slot, the first position, the tables."""
