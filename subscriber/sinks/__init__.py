"""The sinks, one folder for each kind of target, and the modules that they share."""
