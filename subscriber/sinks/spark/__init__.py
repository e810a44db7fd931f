"""A lake as the target: a landing zone, and Delta tables that the applier maintains. Landing needs only pyarrow."""
