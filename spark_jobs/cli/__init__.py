"""Arguments of the jobs."""
