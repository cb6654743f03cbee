"""`ingestd verify`."""
