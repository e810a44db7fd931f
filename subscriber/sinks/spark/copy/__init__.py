"""Initial copies of tables, by the subscriber or by executors of Spark."""
