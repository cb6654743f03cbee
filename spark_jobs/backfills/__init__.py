"""The backfill: its driver, its plans and records, and the tasks that read."""
