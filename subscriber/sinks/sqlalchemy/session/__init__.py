"""Sessions with the target: URL, settings, locks, the fence, and the errors of databases."""
