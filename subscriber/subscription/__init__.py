"""The public façade. It is the only package that wires walreceiver, apply and sinks together."""
