"""Parquet files, measured before they are read."""
