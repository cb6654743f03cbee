"""`ingestd check` for kind `wal`: everything that would fail, before it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.catalog import TableRow, describe, list_tables, refusal
from ingestd.capture.patterns import missing_tables, unmatched
from ingestd.capture.session import classify, connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.publication import (
    add_statement,
    check_publication,
    find_publication,
    owned_by_others,
    owners_statement,
    partial_tables,
    published_tables,
)
from ingestd.capture.wal.server import Server, inspect_server
from ingestd.capture.wal.slot import Slot, find_slot, missing_slot
from ingestd.checks import CheckLine, Level
from ingestd.errors import IngestdError
from ingestd.ports import Refused
from ingestd.schema import TableId

LOW_SAFE_BYTES = 1 << 30
"""Below this much WAL left before the slot is in danger, a warning."""


async def preflight(source: str, settings: WalSettings) -> list[CheckLine]:
    """Look at the server, the role, the tables, the publication and the slot. Changes nothing."""
    found = _Findings(source)
    dsn = settings.dsn.get_secret_value()
    try:
        async with await connect(dsn) as connection:
            await _look(connection, settings, found)
    except IngestdError as error:
        found.fault("connection", error)
    except psycopg.Error as error:
        found.fault("connection", classify(error, f"source {source}, check", dsn))
    return found.lines


class _Findings:
    """Collects lines."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.lines: list[CheckLine] = []

    def note(self, subject: str, level: Level, detail: str, remedy: str | None = None) -> None:
        self.lines.append(CheckLine(self._source, subject, level, detail, remedy))

    def fault(self, subject: str, error: IngestdError) -> None:
        self.note(subject, "fail", error.what, error.remedy)


async def _look(connection: AsyncConnection[Any], settings: WalSettings, found: _Findings) -> None:
    server = await inspect_server(connection)
    info = connection.info
    found.note("connection", "ok", f"{server.role}@{info.host}:{info.port}/{server.database}")
    _server(server, found)
    names = await _tables(connection, settings, server, found)
    await _publication(connection, settings, server, names, found)
    slot = None if server.in_recovery else await find_slot(connection, settings.slot)
    _slot(slot, settings, server, found)


def _server(server: Server, found: _Findings) -> None:
    faults = server.faults()
    for fault in faults:
        found.fault("server", fault)
    if not faults:
        found.note(
            "server", "ok", f"PostgreSQL {server.version_text}, wal_level logical, replication"
        )
    if server.max_senders == 0:
        found.note(
            "max_wal_senders",
            "fail",
            "0: no replication connections",
            "ALTER SYSTEM SET max_wal_senders = 10; then restart the server",
        )


async def _tables(
    connection: AsyncConnection[Any], settings: WalSettings, server: Server, found: _Findings
) -> list[TableId]:
    rows = await list_tables(connection)
    absent = missing_tables(settings, [r.id for r in rows])
    for missing in absent:
        error = missing.error
        found.note(f"table {missing.table.id}", "fail", error.reason, error.remedy)
    wanted = [r for r in rows if settings.includes(r.schema, r.name)]
    tables = await describe(connection, wanted, before_full=settings.before == "full")
    partial = await partial_tables(connection, settings.publication, server.version)
    good: list[TableRow] = []
    for row, table in zip(wanted, tables, strict=True):
        refused = refusal(row, table, server.role)
        if refused is None and row.id in partial:
            refused = Refused(table, partial[row.id])
        if refused is None:
            good.append(row)
            key = ", ".join(table.identity) if row.replica_identity != "f" else "whole rows"
            found.note(f"table {row.id}", "ok", f"{len(table.columns)} columns, identity: {key}")
        else:
            found.note(f"table {row.id}", "fail", refused.error.reason, refused.error.remedy)
    for pattern in unmatched(settings, [r.id for r in rows]):
        found.note("tables", "warn", f"no table matches {pattern!r} yet", "look at `tables`")
    return [r.id for r in good]


async def _publication(
    connection: AsyncConnection[Any],
    settings: WalSettings,
    server: Server,
    names: Sequence[TableId],
    found: _Findings,
) -> None:
    name = settings.publication
    publication = await find_publication(connection, name)
    published = await published_tables(connection, name)
    absent = sorted(set(names) - published)
    subject = f"publication {name}"
    if not settings.manage:
        fault = check_publication(name, publication, names)
        if fault is not None:
            found.fault(subject, fault)
        elif absent:
            listed = ", ".join(map(str, absent))
            remedy = add_statement(name, absent).as_string(None) + ";"
            found.note(subject, "fail", f"lacks {listed}, and manage = false", remedy)
        else:
            found.note(subject, "ok", f"{len(published)} tables")
        return
    others = await owned_by_others(connection, absent)
    statement = await owners_statement(connection, name, names)
    by_owner = f"{statement}  -- as the tables' owner; then set manage = false"
    if publication is None and not server.may_create:
        found.note(subject, "fail", f"no CREATE right on database {server.database}", by_owner)
    elif publication is not None and not publication.owned and absent:
        found.note(subject, "fail", "belongs to another role", by_owner)
    elif others:
        listed = ", ".join(map(str, others))
        found.note(subject, "fail", f"not the owner of {listed}", by_owner)
    else:
        will = "will be created" if publication is None else f"{len(published)} tables"
        found.note(subject, "ok", will if not absent else f"{will}, {len(absent)} to be added")


def _slot(slot: Slot | None, settings: WalSettings, server: Server, found: _Findings) -> None:
    name = settings.slot
    subject = f"slot {name}"
    if slot is None:
        if not settings.manage:
            found.fault(subject, missing_slot(name))
        elif server.used_slots >= server.max_slots:
            found.note(
                subject,
                "fail",
                f"all {server.max_slots} replication slots are in use",
                "ALTER SYSTEM SET max_replication_slots = ...; then restart the server, "
                "or drop a slot that nothing uses",
            )
        else:
            found.note(subject, "ok", "will be created")
        return
    fault = slot.fault(name, server.database)
    if fault is not None:
        found.fault(subject, fault)
    elif slot.is_lost:
        action = "all tables are read anew" if settings.slot_lost == "resnapshot" else "it stops"
        found.note(subject, "warn", f"invalid: the server removed WAL that it needs; {action}")
    elif slot.active_pid is not None and slot.holder != "ingestd":
        found.note(
            subject,
            "fail",
            f"in use by pid {slot.active_pid} ({slot.holder or 'unknown'})",
            f"stop that client, or SELECT pg_terminate_backend({slot.active_pid});",
        )
    elif slot.active_pid is not None:
        found.note(subject, "warn", f"in use by a running ingestd (pid {slot.active_pid})")
    elif slot.safe_bytes is not None and slot.safe_bytes < LOW_SAFE_BYTES:
        found.note(
            subject,
            "warn",
            f"invalid after {slot.safe_bytes} more bytes of WAL",
            "start ingestd, or raise max_slot_wal_keep_size",
        )
    else:
        found.note(subject, "ok", f"at {slot.confirmed}, {slot.retained_bytes} bytes behind")
