"""The verbs that read a stream without a target, and recordings."""
