"""The stream without a sink: the transactions of a publisher for programs that do not keep a replica, and captures of the protocol."""
