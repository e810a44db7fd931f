"""Reading a lake by Spark: snapshots as DataFrames, and changes as a data source."""
