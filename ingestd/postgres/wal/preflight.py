"""`ingestd check` for kind `wal`: finds everything that would fail, before it fails.

The judgements are those of a start: `WalServer.faults` (version, wal_level, the REPLICATION right),
`slot_fault`, `check_publication` and `incomplete`. Here they are collected, and none is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.decode.type_mapping import BUILT_IN
from ingestd.model.check import CheckLine, Level
from ingestd.model.errors import IngestdError, TableError
from ingestd.model.schema import Table, TableId
from ingestd.ports import ServerDemand
from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.captured.selection import is_left_out, missing_tables, unmatched_notices
from ingestd.postgres.catalog.publication import find_publication, published
from ingestd.postgres.catalog.replica_identity import (
    PublishedIdentity,
    identify,
    incomplete,
    only_inserts,
    only_keys,
    whole_rows,
)
from ingestd.postgres.catalog.tables import NO_COLUMNS, refusal, table_of
from ingestd.postgres.check import CheckFindings, column_notes, left_out
from ingestd.postgres.connection.authentication import check_lines
from ingestd.postgres.connection.claim import ClaimHolder, claim_holder
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import FREE_A_SENDER, classify
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.tls import check_line
from ingestd.postgres.rewrites.ddl_script import REMEDY, ddl_log_fault, script
from ingestd.postgres.server_capacity import SENDERS, SLOTS, demand_of, room_lines
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.read_probe import LOCK_TIMEOUT_S, read_fault
from ingestd.postgres.wal.publication.alteration import (
    possible_lists,
    refused_by_trigger,
    why_refused,
)
from ingestd.postgres.wal.publication.statements import (
    ColumnLists,
    add_statement,
    column_lists,
    outdated,
)
from ingestd.postgres.wal.publication.unmanaged import (
    check_publication,
    owned_by_others,
    owners_statement,
    partitioned_of,
)
from ingestd.postgres.wal.server import WalServer, inspect_server, server_notices
from ingestd.postgres.wal.slots.slot import Slot, find_slot, slot_fault

LOW_SAFE_BYTES = 1 << 30
"""With less WAL than this left before the slot is invalidated, warn."""


MAX_NAMED = 5
"""The most tables to name in one line."""


async def preflight(source: str, settings: WalSettings) -> list[CheckLine]:
    """Check the server, the role, the tables, the publication and the slot.

    Changes nothing: publishing the tables is tried in a transaction that is rolled back.
    """
    found = CheckFindings(source)
    dsn = settings.dsn.get_secret_value()
    try:
        found.add_line(check_line(source, read_dsn(dsn)))
        found.lines += check_lines(source, read_dsn(dsn))
        async with await connect(dsn, reads_names=True) as connection:
            await _check_server(connection, source, settings, found)
    except IngestdError as error:
        found.fault("connection", error)
    except psycopg.Error as error:
        found.fault("connection", classify(error, f"source {source}, check", dsn))
    return found.lines


async def _check_server(
    connection: AsyncConnection[Any], source: str, settings: WalSettings, findings: CheckFindings
) -> None:
    dsn = settings.dsn.get_secret_value()
    server = await inspect_server(connection, dsn)
    info = connection.info
    findings.note("connection", "ok", f"{server.role}@{info.host}:{info.port}/{server.database}")
    _server(server, findings)
    async with await connect(dsn, lock_timeout_s=LOCK_TIMEOUT_S) as reading:
        tables = await _tables(connection, reading, settings, server, findings)
    await _publication(connection, settings, server, tables, findings)
    holder = await _room(connection, source, settings, server, findings)
    if settings.logs_ddl:
        sent = await published(connection, settings.publication, server.version)
        await _ddl_log(connection, [t.oid for t in tables if t.id in sent], findings)
    slot = await find_slot(connection, settings.slot)
    _slot(slot, settings, server, findings, holder)


async def _ddl_log(
    connection: AsyncConnection[Any], tables: Sequence[int], findings: CheckFindings
) -> None:
    """Check the event triggers; the remedy is the script, to be pasted."""
    fault = await ddl_log_fault(connection, tables)
    if fault is None:
        findings.note("ddl_log", "ok", "event triggers and triggers for TRUNCATE are in place")
        return
    remedy = script() if fault.remedy == REMEDY else fault.remedy
    findings.note(
        "ddl_log",
        "warn",
        f"{fault.what}: only the catalog checks apply",
        remedy,
    )


def _server(server: WalServer, findings: CheckFindings) -> None:
    faults = server.faults()
    for fault in faults:
        findings.fault("server", fault)
    if not faults:
        findings.note(
            "server", "ok", f"PostgreSQL {server.version_text}, wal_level logical, replication"
        )
    if not faults and server.in_recovery and not server.feedback:
        findings.note(
            "standby",
            "warn",
            "hot_standby_feedback is off: the primary may remove what the slot needs, and "
            "invalidate it",
            "ALTER SYSTEM SET hot_standby_feedback = on; SELECT "
            "pg_catalog.pg_reload_conf();  -- here, with "
            "primary_slot_name set to a slot of the primary",
        )
    if server.max_senders == 0:
        findings.note("max_wal_senders", "fail", "0: no replication connections", FREE_A_SENDER)


async def _room(
    connection: AsyncConnection[Any],
    source: str,
    settings: WalSettings,
    server: WalServer,
    findings: CheckFindings,
) -> ClaimHolder | None:
    """Report what the server has no room for; return the holder of the claim."""
    demand = await demand_for(connection, settings)
    findings.lines += room_lines({source: demand})
    holder = await claim_holder(connection, settings.slot)
    if holder is None and not server.faults() and server.max_senders:
        dsn = settings.dsn.get_secret_value()
        try:
            async with await connect(dsn, replication=True) as walsender:
                await walsender.execute("IDENTIFY_SYSTEM")
        except psycopg.Error as error:
            findings.fault("replication", classify(error, f"source {source}, replication", dsn))
    return holder


async def demand_for(connection: AsyncConnection[Any], settings: WalSettings) -> ServerDemand:
    """Return what a run needs of the server beyond what is in use. Raises psycopg.Error."""
    slot = await find_slot(connection, settings.slot)
    makes = settings.manage and (slot is None or slot.is_lost)
    needed = {SLOTS: int(makes and slot is None), SENDERS: 1}
    return await demand_of(connection, settings.slot, needed)


async def _tables(
    connection: AsyncConnection[Any],
    reading: AsyncConnection[Any],
    settings: WalSettings,
    server: WalServer,
    findings: CheckFindings,
) -> list[Table]:
    catalog = await read_catalog(settings)
    dsn = settings.dsn.get_secret_value()
    for missing in missing_tables(settings, catalog.present, catalog.not_tables):
        error = missing.error
        findings.note(f"table {missing.table.id}", "fail", error.reason, error.remedy)
    publication = catalog.publication
    is_ours = settings.manage and (publication is None or publication.owned)
    definitions = TableDefinitions(settings)
    await definitions.use_catalog(connection, catalog, {})
    filtered = {name for name, sent in catalog.published.items() if sent.row_filter is not None}
    toasted = await with_toast(connection, [r.oid for r in catalog.rows if r.id in filtered])
    good = []
    for row in catalog.rows:
        plain = table_of(row, catalog.columns.get(row.oid, ()), BUILT_IN)
        sent = catalog.published.get(row.id)
        subject = f"table {row.id}"
        if is_left_out(settings, row.id, catalog.columns.get(row.oid, ())):
            findings.note(subject, "ok", f"{NO_COLUMNS}: left out")
            continue
        try:
            table = definitions.table(row, catalog.columns.get(row.oid, ()))
        except TableError as error:
            findings.note(subject, "fail", error.reason, error.remedy)
            continue
        refused = refusal(row, table, server.role)
        sending = catalog.sending(row)
        fault = (
            refused.error if refused else incomplete(plain, sent, manage=is_ours, sending=sending)
        )
        if fault is not None:
            findings.note(subject, "fail", fault.reason, fault.remedy)
            continue
        good.append(table)
        unread = await read_fault(reading, table, dsn)
        if unread is not None:
            what = unread.reason if isinstance(unread, TableError) else unread.what
            is_needed = settings.snapshot == "initial"
            findings.note(subject, "fail" if is_needed else "warn", what, unread.remedy)
            continue
        detail = _captured(plain, table, settings, sending, is_ours=is_ours)
        lacking = only_inserts(plain, None if is_ours else sent, sending)
        if lacking is None and may_lack_values(table, sending, toasted):
            detail = f"{detail}: {MAY_STOP}"
            findings.note(subject, "warn", detail, whole_rows(plain, sending))
        elif lacking is None:
            findings.note(subject, "ok", detail)
        else:
            detail = f"{lacking}: the server rejects UPDATE and DELETE, only inserts are possible"
            remedy = identify(plain, settings.publication, sent, sending)
            findings.note(subject, "warn", detail, remedy)
    for notice in (
        *unmatched_notices(settings, catalog.present, catalog.not_tables),
        *server_notices(server, dsn),
    ):
        findings.notice(notice)
    return good


def _captured(
    plain: Table, table: Table, settings: WalSettings, sending: PublishedIdentity, *, is_ours: bool
) -> str:
    """Describe what is captured of a table that is `plain` in the catalog."""
    names = ", ".join(table.identity)
    keyed = only_keys(table, sending)
    parts = [
        f"{len(table.columns)} columns",
        f"identity: {'whole rows' if table.replica_identity == 'f' else names}",
        *([f"of partition {keyed.id} keys only"] if keyed else []),
        *column_notes(plain, table),
        *([f"rows where {table.row_filter}"] if table.row_filter else []),
    ]
    unkept = set(left_out(plain, table))
    if not is_ours and unkept - set(settings.controls(table.id).exclude_columns):
        parts.append(f"columns as publication {settings.publication!r} lists them")
    return ", ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


async def _publication(
    connection: AsyncConnection[Any],
    settings: WalSettings,
    server: WalServer,
    tables: Sequence[Table],
    findings: CheckFindings,
) -> None:
    name = settings.publication
    publication = await find_publication(connection, name)
    sent = await published(connection, name, server.version)
    names = [t.id for t in tables]
    lists = await possible_lists(connection, name, column_lists(tables, settings, server.version))
    absent = sorted(set(names) - sent.keys())
    subject = f"publication {name}"
    partitioned = await partitioned_of(connection, names)
    if not settings.manage:
        fault = check_publication(name, publication, names, lists, partitioned)
        if fault is not None:
            findings.fault(subject, fault)
        elif absent:
            listed = ", ".join(map(str, absent))
            remedy = printed(add_statement(name, absent, lists)) + ";"
            findings.note(subject, "fail", f"lacks {listed}, and manage = false", remedy)
        else:
            _sent(subject, sent, settings, findings)
        return
    is_foreign = publication is not None and not publication.owned
    changing = [] if is_foreign else sorted(outdated(sent, names, lists))
    others = await owned_by_others(connection, absent + changing)
    statement = await owners_statement(connection, name, names, lists)
    by_owner = f"{statement}  -- as the tables' owner; then set manage = false"
    on_primary = f"{statement}  -- on the primary"
    if server.in_recovery and (publication is None or absent):
        lacking = f"lacks {', '.join(map(str, absent))}" if publication else "does not exist"
        findings.note(subject, "fail", f"{lacking}, and a standby can't change that", on_primary)
    elif publication is None and not server.may_create:
        findings.note(
            subject, "fail", f"no CREATE privilege on database {server.database}", by_owner
        )
    elif is_foreign and absent:
        findings.note(subject, "fail", "belongs to another role", by_owner)
    elif is_foreign and (
        fault := check_publication(name, publication, names, partitioned=partitioned)
    ):
        findings.fault(subject, fault)
    elif others:
        listed = ", ".join(map(str, others))
        findings.note(subject, "fail", f"not the owner of {listed}", by_owner)
    elif await _note_refused(connection, name, absent + changing, lists, findings):
        more = f", {len(absent)} to be added" if absent else ""
        _sent(subject, None if publication is None else sent, settings, findings, more)


async def _note_refused(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists,
    findings: CheckFindings,
) -> bool:
    """Add the tables that the server refuses to publish; return whether that could be tried."""
    try:
        refused = await why_refused(connection, name, tables, lists)
    except psycopg.Error as error:
        disable = await refused_by_trigger(connection, error)
        level: Level = "warn" if disable is None else "fail"
        findings.note(
            f"publication {name}", level, f"trial failed: {loggable_message(error)}", disable
        )
        return False
    for table, fault in refused.items():
        findings.note(f"table {table}", "fail", fault.reason, fault.remedy)
    return True


def _sent(
    subject: str,
    sent: Iterable[TableId] | None,
    settings: WalSettings,
    findings: CheckFindings,
    more: str = "",
) -> None:
    """Report what a publication sends, and what ingestd skips of that. None: it does not exist."""
    if sent is None:
        findings.note(subject, "ok", f"will be created{more}")
        return
    tables = sorted(sent)
    unasked = [t for t in tables if not settings.includes(t.schema, t.name)]
    detail = f"{len(tables)} tables{more}"
    if not unasked:
        findings.note(subject, "ok", detail)
        return
    named = ", ".join(map(str, unasked[:MAX_NAMED]))
    others = f" and {len(unasked) - MAX_NAMED} others" if len(unasked) > MAX_NAMED else ""
    findings.note(
        subject,
        "warn",
        f"{detail}; it sends changes of {named}{others}, which `tables` does not match: skipped",
        "drop them from the publication, or match them in `tables`",
    )


def _slot(
    slot: Slot | None,
    settings: WalSettings,
    server: WalServer,
    findings: CheckFindings,
    holder: ClaimHolder | None,
) -> None:
    name = settings.slot
    subject = f"slot {name}"
    fault = slot_fault(slot, settings, server.database)
    if slot is not None and slot.active_pid is not None and holder is not None:
        # By the claim, which a daemon holds whatever its application_name.
        findings.note(subject, "warn", f"in use by a running ingestd ({holder})")
    elif fault is not None:
        findings.fault(subject, fault)
    elif slot is None:
        findings.note(subject, "ok", "will be created")
    elif slot.is_lost:
        action = "all tables are re-read" if settings.slot_lost == "resnapshot" else "it stops"
        findings.note(subject, "warn", f"invalid: {slot.why_lost}; {action}")
    elif slot.safe_bytes is not None and slot.safe_bytes < LOW_SAFE_BYTES:
        findings.note(
            subject,
            "warn",
            f"invalid after {slot.safe_bytes} more bytes of WAL",
            "start ingestd, or raise max_slot_wal_keep_size",
        )
    else:
        copied = "; standbys may keep a copy" if slot.failover else ""
        behind = f"{slot.retained_bytes} bytes behind"
        findings.note(subject, "ok", f"at {slot.confirmed}, {behind}{copied}")


MAY_STOP = "an UPDATE that moves a row into the filter without its TOASTed values stops the table"

# Without a TOAST table there are no out-of-line values. Partitioned tables: see the partitions.
# (pg_partition_tree would lock them.)
_WITH_TOAST = """
WITH RECURSIVE t AS (
  SELECT r.oid AS root, r.oid FROM pg_catalog.unnest(%s::oid[]) r (oid)
  UNION
  SELECT t.root, i.inhrelid FROM t JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT DISTINCT t.root::int8
  FROM t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.reltoastrelid <> 0
"""


async def with_toast(connection: AsyncConnection[Any], tables: Sequence[int]) -> set[int]:
    """Return those of these tables (OIDs) that may have out-of-line values."""
    cursor = await connection.execute(_WITH_TOAST, (list(tables),))
    return {oid for (oid,) in await cursor.fetchall()}


def may_lack_values(table: Table, sending: PublishedIdentity, toasted: set[int]) -> bool:
    """Return whether an UPDATE that moves a row into the row filter may omit values.

    See `ingestd.model.row_checks`.
    """
    is_whole = table.replica_identity == "f" and only_keys(table, sending) is None
    return table.row_filter is not None and not is_whole and table.oid in toasted
