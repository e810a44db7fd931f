"""The façade and the only wiring place: it alone knows walreceiver, apply and sinks."""
