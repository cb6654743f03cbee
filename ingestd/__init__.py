"""ingestd: Postgres changes into a Delta lake, exactly once."""

__version__ = "0.1.0"
