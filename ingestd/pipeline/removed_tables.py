"""The events of `_tables` for tables that can't or need not be captured any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime

from ingestd.model.errors import TableError
from ingestd.model.lake_state import RegisteredTable, TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Discovery


def stopped(table: Table, error: TableError, at: datetime, at_lsn: Lsn) -> TableEvent:
    """Return the event of a table that can't continue."""
    state = TableState.STOPPED
    return TableEvent(table, state, at, at_lsn, reason=error.reason, remedy=error.remedy)


def removed(
    discovery: Discovery,
    known: Mapping[TableId, RegisteredTable],
    captured: Collection[TableId],
    at: datetime,
    at_lsn: Lsn,
) -> list[TableEvent]:
    """Return the events of tables that a discovery refuses or no longer has.

    Only new ones: what `_tables` already has (`known`) is not repeated. `captured`: the tables that
    the discovery has and does not refuse.
    """
    events = []
    for refused in discovery.refused:
        before = known.get(refused.table.id)
        event = stopped(refused.table, refused.error, at, at_lsn)
        if before is not None and before.oid and not refused.table.oid:  # it existed once
            dropped = Table(before.table, before.oid, ())
            event = replace(event, table=dropped, state=TableState.DROPPED)
        if before is None or (before.state, before.reason) != (event.state, event.reason):
            events.append(event)
    present = {*captured, *(refused.table.id for refused in discovery.refused)}
    for name, before in known.items():
        if name not in present and before.state is not TableState.DROPPED:
            dropped = Table(name, before.oid, ())
            reason = "no longer in the source, or not matched by `tables`"
            events.append(
                TableEvent(dropped, TableState.DROPPED, at, at_lsn, before.snapshot_lsn, reason)
            )
    return events
