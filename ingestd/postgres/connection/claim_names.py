"""The advisory lock with which a daemon claims a source (I5)."""

from __future__ import annotations

import hashlib

from ingestd.config import SourceSettings
from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.dsn import read_dsn, role_of


def claim_key(name: str) -> int:
    """Return the lock's key for the name of a slot or source: a signed 64-bit number."""
    digest = hashlib.sha256(f"ingestd/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def claim_of(settings: SourceSettings) -> str:
    """Return the name of the claim on a source."""
    return claim_text(getattr(settings, "slot", None), settings.dsn.get_secret_value())


def signature_of(settings: SourceSettings) -> str:
    """Return the name of the claim for commits. For a polled source it includes the role.

    A poller with a different role is not excluded: its lock may not count (`claim`).
    """
    claim = claim_of(settings)
    if getattr(settings, "slot", None) is not None:
        return claim
    try:
        role = role_of(settings.dsn.get_secret_value())
    except OperatorError:
        return claim
    return claim if role is None else claim.replace("polling", f"polling as role {role!r}", 1)


def claim_text(slot: str | None, dsn: str) -> str:
    """Return a readable name of the claim: the slot, if there is one, and the database.

    A client that uses a different slot is not excluded by the claim on this one.
    """
    name = "polling" if slot is None else f"slot {slot!r}"
    try:
        found = read_dsn(dsn)
    except OperatorError:
        return name  # such a DSN is never connected to
    places = {"database": "dbname", "at": "host", "port": "port"}
    known = [f"{word} {found[key]}" for word, key in places.items() if found.get(key)]
    return ", ".join([name, " ".join(known)] if known else [name])
