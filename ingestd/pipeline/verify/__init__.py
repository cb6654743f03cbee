"""Verification of a lake against its source: `ingestd verify`."""
