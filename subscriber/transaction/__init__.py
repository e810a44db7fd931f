"""Assemble messages to committed transactions, and track the positions to report. No IO."""
