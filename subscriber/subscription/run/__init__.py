"""One run of a subscription: following the slot, copying tables, reports and the watchdog."""
