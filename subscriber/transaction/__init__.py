"""Messages to committed transactions, and the positions to report, without IO."""
