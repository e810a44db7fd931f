"""The target's tables: names, types, conversion of values, reflection, and creation."""
