"""The lake's side of `ingestd verify`."""
