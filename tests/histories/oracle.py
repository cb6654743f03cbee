"""The lake held against the source, after a check of the catalog.

The lake is folded by `ingestd.testing.oracle.folding`, which shares no code with what writes it;
the source is read by the output functions of its types.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltalake.exceptions import TableNotFoundError

from ingestd.lake.delta.read import read_raw
from ingestd.testing.oracle.comparison import (
    read_registry,
    source_columns,
    source_key,
    source_rows,
    source_tables,
)
from ingestd.testing.oracle.folding import FoldedTable, fold
from ingestd.testing.oracle.schema_history import SchemaHistory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ingestd.model.schema import TableId
    from tests.harness.databases import Database

SOURCE = "shop"
CAPTURED = ("public", "other")
"""The schemas that the daemon captures."""


_IN_PART = """
SELECT EXISTS (SELECT FROM pg_publication_rel r
                 JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = %s AND c.relname = %s
                  AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL))
"""
"""Rows or columns are left out of the publication: a later step that puts them back was refused."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one table.

    `state`: that of the daemon's status. `rows`: in the source. `wrong`: how lake and source
    differ, empty if they do not. `unsound`: what can't be in a right change log, though the rows
    may be the same in the end. `markers`: how often it was read.
    """

    table: str
    state: str
    reason: str
    rows: int
    wrong: tuple[str, ...]
    unsound: tuple[str, ...]
    markers: int

    @property
    def is_lost(self) -> bool:
        """Whether it differs, and nothing says so."""
        return bool(self.wrong) and self.state != "stopped"


def present(database: Database, prefix: str) -> list[TableId]:
    """List the tables of a history that are captured."""
    with database.connect() as connection:
        found = source_tables(connection)
    return [t for t in found if t.schema in CAPTURED and t.name.startswith(f"{prefix}_")]


def compare(
    database: Database,
    lake: Path,
    tables: Iterable[TableId],
    states: dict[str, dict[str, Any]],
) -> list[Verdict]:
    """Compare these tables now. `states`: of the daemon's status, by table."""
    events = read_registry(str(lake), SOURCE)
    found = []
    with database.connect() as connection:
        for table in tables:
            columns = source_columns(connection, table)
            key = source_key(connection, table)
            there = source_rows(connection, table, columns)
            folded, markers = _folded(lake, table, columns, key, events)
            missing, surplus = there - folded.rows, folded.rows - there
            if connection.execute(_IN_PART, (table.schema, table.name)).fetchone() == (True,):
                missing, surplus = Counter(), Counter()
            wrong = [f"{folded.repeated} positions twice"] * bool(folded.repeated)
            wrong += [f"only in the source: {row}" for row in list(missing)[:3]]
            wrong += [f"only in the lake: {row}" for row in list(surplus)[:3]]
            if missing or surplus:
                wrong.append(f"{there.total()} rows in the source, {folded.rows.total()} in it")
            state = states.get(str(table), {})
            found.append(
                Verdict(
                    str(table),
                    state.get("state", "absent"),
                    state.get("reason") or "",
                    there.total(),
                    tuple(w[:200] for w in wrong),
                    tuple(folded.faults),
                    markers,
                )
            )
    return found


def _folded(
    lake: Path, table: TableId, columns: list[str], key: list[str], events: list[dict[str, Any]]
) -> tuple[FoldedTable, int]:
    try:
        raw = read_raw(str(lake), SOURCE, table)
    except TableNotFoundError:
        return FoldedTable(), 0
    markers = raw["_cdc_seq"].to_pylist().count(-1)
    return fold(raw, columns, key, SchemaHistory.from_events(events, table)), markers


def inserted(lake: Path, table: TableId) -> tuple[str, ...]:
    """Return the values of `v` of the rows whose insertion is in a log."""
    rows = sorted(
        read_raw(str(lake), SOURCE, table).to_pylist(),
        key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]),
    )
    return tuple(row["v"] for row in rows if row["_cdc_op"] == "c")
