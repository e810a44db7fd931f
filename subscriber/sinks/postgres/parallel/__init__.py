"""Parallel apply: of transactions before their end, and of groups of transactions (``apply_workers``)."""
