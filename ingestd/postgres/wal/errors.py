"""The error that a failpoint raises in place of psycopg, before the fault is classified."""

from __future__ import annotations

import psycopg


def cut_off(text: str) -> psycopg.Error:
    """Return the error that psycopg raises when the server closes the connection."""
    return psycopg.OperationalError(f"server closed the connection unexpectedly ({text})")
