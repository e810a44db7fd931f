"""The applier: rounds that turn landed batches into commits of Delta tables, and the engines that do the work."""
