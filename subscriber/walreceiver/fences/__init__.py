"""Fences: what keeps applications from writing to the old database during a cutover."""
