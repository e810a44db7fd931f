"""The catalog of subscriptions in a target."""
