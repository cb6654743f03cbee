"""What the fold needs of Spark: large batches, and kept values; else `ingestd.lake.fold`."""
