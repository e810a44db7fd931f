"""Reading a lake with Spark: snapshots as DataFrames, and changes as a data source."""
