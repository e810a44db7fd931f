"""The demonstration: ``subscriber demo``."""
