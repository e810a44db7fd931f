"""Subscriptions: their runs, the verbs that define them, and the launcher."""
