"""What the pipeline reports to metrics, status and log."""
