"""The advisory lock by which a daemon claims a source (I5)."""

from __future__ import annotations

import hashlib

from ingestd.config import SourceSettings
from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.dsn import read_dsn, role_of


def claim_key(name: str) -> int:
    """Return the lock's key for a slot's or source's name: a signed 64-bit number."""
    digest = hashlib.sha256(f"ingestd/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def claim_of(settings: SourceSettings) -> str:
    """Name the claim by which a source is worked on."""
    return claim_text(getattr(settings, "slot", None), settings.dsn.get_secret_value())


def signature_of(settings: SourceSettings) -> str:
    """Name the claim for what is committed: of a polled source by the role, too.

    Nothing keeps out who polls by another role: its lock need not be counted (`claiming`).
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
    """Name the claim on a source for people: its slot, if there is one, and the database.

    Who works by another slot is not kept out by the claim on this one.
    """
    name = "polling" if slot is None else f"slot {slot!r}"
    try:
        told = read_dsn(dsn)
    except OperatorError:
        return name  # nothing is claimed with such a DSN
    places = {"database": "dbname", "at": "host", "port": "port"}
    known = [f"{word} {told[key]}" for word, key in places.items() if told.get(key)]
    return ", ".join([name, " ".join(known)] if known else [name])
