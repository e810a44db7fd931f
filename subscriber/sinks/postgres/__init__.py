"""PostgreSQL as a target. ``sink.py`` has the sink, ``catalog/subscriptions.py`` the catalog of subscriptions."""
