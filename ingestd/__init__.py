"""ingestd: Postgres changes into a Delta lake, exactly once.

ARCHITECTURE.md introduces the code. Docstrings that cite `design section N` refer to
docs/internals/design.md.
"""

__version__ = "0.1.0"
