"""One port for metrics, probes and the page. It runs in a thread of its own, so that slow clients do not hold up replication."""
