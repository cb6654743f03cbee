"""The backfill."""
