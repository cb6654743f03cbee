"""What a failpoint raises where psycopg would, before the fault is classified."""

from __future__ import annotations

import psycopg


def cut_off(text: str) -> psycopg.Error:
    """Make what psycopg raises when the server is gone."""
    return psycopg.OperationalError(f"server closed the connection unexpectedly ({text})")
