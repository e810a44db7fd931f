"""The catalog of subscriptions in a PostgreSQL target."""
