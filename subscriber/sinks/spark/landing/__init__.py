"""The landing zone: transactions as Parquet files, with manifests that make them durable batches."""
