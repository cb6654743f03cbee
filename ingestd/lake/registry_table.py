"""The table `_tables`: when each table was captured, and with which schema (design section 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from ingestd.failpoints import lost, reach
from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_INTERVAL
from ingestd.lake.delta.log import AcceptTorn
from ingestd.lake.delta.read import read_files
from ingestd.lake.parquet_writer import FragmentWriter
from ingestd.lake.schema_evolution import additions
from ingestd.model.lake_state import RegisteredColumn, RegisteredTable, TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.printable_text import printable
from ingestd.model.schema import TIMESTAMP, Column, TableId, lake_type_name

_MICROSECOND = timedelta(microseconds=1)

_COLUMN = pa.struct(
    [
        ("name", pa.string()),
        ("pg_type", pa.string()),
        ("type_oid", pa.int64()),
        ("typmod", pa.int32()),
        ("delta_type", pa.string()),
        ("identity", pa.bool_()),
        ("nullable", pa.bool_()),
        ("comment", pa.string()),
        ("missing", pa.string()),
        ("source_name", pa.string()),
        ("key", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("table", pa.string()),
        ("oid", pa.int64()),
        ("schema_version", pa.int32()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("snapshot_lsn", pa.int64()),
        ("at_lsn", pa.int64()),
        ("at", TIMESTAMP),
        ("replica_identity", pa.string()),
        ("columns", pa.list_(pa.field("element", _COLUMN))),
        ("storage", pa.string()),
        ("progress", pa.string()),
    ]
)
_LATER = {"storage", "progress", "source_name", "key"}
_FIRST = pa.schema(
    [f for f in SCHEMA if f.name not in _LATER | {"columns"}]
    + [pa.field("columns", pa.list_(pa.struct([f for f in _COLUMN if f.name not in _LATER])))]
)
"""The schema that the earliest versions of ingestd wrote."""


class RegistryTable:
    """`_tables`. All calls block; one at a time."""

    def __init__(self, log: AppendLog, before_commit: Callable[[str], None]) -> None:
        self._log = log
        self._before_commit = before_commit
        self._last: dict[str, dict[str, Any]] = {}
        self._tables: dict[str, RegisteredTable] = {}

    @property
    def exists(self) -> bool:
        """Return whether `load` found it or it was created."""
        return self._log.exists

    def load(self, accept_torn: AcceptTorn | None = None) -> None:
        """Read the last row of every table; `accept_torn`: see `TableLog.load`."""
        self._log.load(accept_torn)
        self._last, self._tables = {}, {}
        if not self._log.exists:
            return
        self._log.ensure_fields(_FIRST)
        rows = read_files(
            self._log.handle, self._log.store, self._log.folder, schema=SCHEMA
        ).to_pylist()
        for row in sorted(rows, key=lambda r: r["at"]):
            for column in row["columns"]:
                # Earlier versions wrote no source_name: their lake columns had the source's names.
                column["source_name"] = column["source_name"] or column["name"]
            self._keep(row)

    def tables(self) -> dict[str, RegisteredTable]:
        """Return the current state of every table, by its text ("schema.table")."""
        return dict(self._tables)

    def table(self, table: TableId) -> RegisteredTable | None:
        """Return the current state of one table."""
        return self._tables.get(str(table))

    def _keep(self, row: dict[str, Any]) -> None:
        name = row["table"]
        self._last[name] = row
        self._tables[name] = _registered(row).carrying(self._tables.get(name))

    def adopt(self) -> None:
        """Create the table, or add the fields that an earlier version of ingestd left out."""
        present = self._log.schema()
        if present is None:
            self._log.create(
                Creation(SCHEMA, {"delta.checkpointInterval": str(CHECKPOINT_INTERVAL)})
            )
        elif added := additions(present, SCHEMA):
            self._log.add_columns(added)

    def record(self, events: Sequence[TableEvent]) -> None:
        """Append events durably. A schema that differs from the last one gets the next version."""
        last = dict(self._last)
        rows = []
        for event in events:
            row = _row(event, last.get(str(event.table.id)))
            last[row["table"]] = row
            rows.append(row)
        writer = FragmentWriter(self._log.store, self._log.folder, (), makes_folder=False)
        fragments = writer.finish([pa.Table.from_pylist(rows, SCHEMA)])
        self._before_commit("_tables")
        reach("sink.tables_commit.before", lost)
        self._log.commit_files(fragments)
        reach("sink.tables_commit.after", lost)
        for row in rows:
            self._keep(row)


def _row(event: TableEvent, before: dict[str, Any] | None) -> dict[str, Any]:
    table = event.table
    key = table.captured_key
    row: dict[str, Any] = {
        "table": str(table.id),
        "oid": table.oid,
        "state": str(event.state),
        "reason": None if event.reason is None else printable(event.reason),
        "snapshot_lsn": None if event.snapshot_lsn is None else int(event.snapshot_lsn),
        "at_lsn": int(event.at_lsn),
        "at": event.at,
        "replica_identity": table.replica_identity,
        "columns": [_column(c, is_key=c.name in key) for c in table.columns],
        "storage": table.fingerprint,
        "progress": event.progress or None,
    }
    if before is None:
        return {**row, "schema_version": 1}
    if not table.columns and event.state in {TableState.LIVE, TableState.SNAPSHOTTING}:
        row["columns"] = before["columns"]
    # The last row is the one with the latest time, as compaction may change the order of rows. So
    # each event of a table must be later than the one before, even if hosts' clocks disagree.
    row["at"] = max(event.at, before["at"] + _MICROSECOND)
    same = all(before[k] == row[k] for k in ("oid", "replica_identity", "columns"))
    return {**row, "schema_version": before["schema_version"] + (0 if same else 1)}


def _column(column: Column, *, is_key: bool) -> dict[str, Any]:
    return {
        "name": column.lake_name,
        "pg_type": column.pg_type,
        "type_oid": column.type_oid,
        "typmod": column.typmod,
        "delta_type": lake_type_name(column.type),
        "identity": column.identity,
        "nullable": column.nullable,
        "comment": column.comment,
        "missing": column.missing,
        "source_name": column.name,
        "key": is_key,
    }


def _registered(row: dict[str, Any]) -> RegisteredTable:
    return RegisteredTable(
        table=TableId.parse(row["table"]),
        oid=row["oid"],
        schema_version=row["schema_version"],
        state=TableState(row["state"]),
        reason=row["reason"],
        snapshot_lsn=None if row["snapshot_lsn"] is None else Lsn(row["snapshot_lsn"]),
        columns=tuple(
            RegisteredColumn(
                name=c["name"],
                source_name=c["source_name"],
                type_oid=c["type_oid"],
                typmod=c["typmod"],
                lake_type=c["delta_type"],
                missing=c["missing"],
                identity=c["identity"],
                key=bool(c["key"]),
            )
            for c in row["columns"]
        ),
        fingerprint=row["storage"] or "",
        at=row["at"],
        replica_identity=row["replica_identity"],
        progress=row["progress"] or "",
    )
