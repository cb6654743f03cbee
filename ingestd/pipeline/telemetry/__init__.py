"""The pipeline's reports to metrics, status and log."""
