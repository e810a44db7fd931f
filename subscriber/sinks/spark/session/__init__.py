"""The Spark session: Java, the session itself, and errors of its jobs."""
