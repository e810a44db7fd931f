"""CREATE, ALTER and DROP SUBSCRIPTION, and the status of the subscriptions of a target."""
