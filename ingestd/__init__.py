"""ingestd: Postgres changes into a Delta lake, exactly once.

ARCHITECTURE.md is the way into the code. Docstrings that cite `design section N` mean
docs/internals/design.md.
"""

__version__ = "0.1.0"
