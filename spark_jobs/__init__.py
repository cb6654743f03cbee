"""PySpark jobs: backfill a lake, mirror it, keep its history, and reconcile it with its source."""
