"""The invariants of a lake, asserted against its source."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

import ingestd
from ingestd.lake.delta.read import read_files, read_raw
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.testing.oracle.comparison import (
    await_caught_up,
    compare_source,
    read_registry,
    source_columns,
    source_rows,
    source_tables,
)
from ingestd.testing.oracle.server_text import FLOAT_TEXTS, text_function
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import psycopg
    import pyarrow as pa

    from ingestd.model.schema import TableId
    from ingestd.testing.oracle.comparison import LakeComparison
    from ingestd.testing.oracle.folding import Texts
    from tests.harness.databases import Database

SNAPSHOTS_S = 10.0


def assert_lake_equals_source(
    database: Database,
    lake: Path | str,
    source: str = "shop",
    tables: Sequence[TableId] | None = None,
    *,
    slot: str | None = None,
    limit_s: float = 60.0,
) -> list[LakeComparison]:
    """Wait until the slot is confirmed up to now, then compare row by row; return the comparisons.

    The writers must be idle. `slot`: ``ingestd_<source>`` by default.
    """
    with database.connect() as connection:
        await_caught_up(connection, slot or f"ingestd_{source}", limit_s)
        _await_snapshots(lake, source)
        comparisons = compare_source(connection, str(lake), source, tables)
        wrong = [str(c) for c in comparisons if not c.is_equal]
        wrong += wrong_current_rows(connection, lake, source, [c.table for c in comparisons])
    assert comparisons, "nothing to compare"
    assert not wrong, "\n".join(wrong)
    return comparisons


def wrong_current_rows(
    connection: psycopg.Connection[Any],
    lake: Path | str,
    source: str,
    tables: Sequence[TableId],
) -> list[str]:
    """Compare what `ingestd.open_lake` reads of the same tables; those it refuses are left out."""
    read = ingestd.open_lake(str(lake)).source(source)
    described = {each.name: each for each in read.tables()}
    complete = {each.name for each in read.tables() if each.is_complete}
    wrong = []
    for table in (each for each in tables if str(each) in complete):
        captured = described[str(table)].columns.names  # others are excluded by the config
        columns = [name for name in source_columns(connection, table) if name in captured]
        found = read.table(str(table)).current(columns=[*columns, "_cdc_raw"])
        there, texts = source_rows(connection, table, columns), current_texts(found)
        if there != texts:
            sides = list(there - texts)[:2], list(texts - there)[:2]
            wrong.append(f"{table}: only in the source, only in the current rows: {sides}")
    return wrong


def current_texts(rows: pa.Table) -> Counter[Texts]:
    """Return current rows as the server's texts, with their number of copies."""
    names = [name for name in rows.column_names if name != "_cdc_raw"]
    functions = {name: text_function(rows.schema.field(name).type) for name in names}

    def text(row: dict[str, Any], name: str) -> str | None:
        raw: dict[str, str] = dict(row["_cdc_raw"] or ())
        function = functions[name]
        if name not in raw:
            return None if row[name] is None else function(row[name])
        assert row[name] is None, "a value and its text"
        return function(raw[name]) if function in FLOAT_TEXTS else raw[name]

    return Counter(tuple(text(row, name) for name in names) for row in rows.to_pylist())


def _await_snapshots(lake: Path | str, source: str) -> None:
    """Wait for snapshots that are under way, though not for those that have come to a halt.

    The slot may be confirmed between the epochs with a table's `r` rows and with their `t`: until
    then a table without a key has old and new rows.
    """
    deadline = time.monotonic() + SNAPSHOTS_S
    while time.monotonic() < deadline:
        states = {row["table"]: row["state"] for row in registry(lake, source)}
        if "snapshotting" not in states.values():
            return
        time.sleep(0.05)


def epochs(lake: Path | str, source: str = "shop") -> list[dict[str, Any]]:
    """Return the rows of `_epochs`, in order; empty if the table does not exist."""
    return sorted(_rows(lake, Layout(source).epochs), key=lambda row: int(row["epoch"]))


def registry(lake: Path | str, source: str = "shop") -> list[dict[str, Any]]:
    """Return the rows of `_tables`, in order; empty if the table does not exist."""
    return sorted(read_registry(str(lake), source), key=lambda row: row["at"])


def _rows(lake: Path | str, folder: str) -> list[dict[str, Any]]:
    store = open_store(str(lake), None)
    try:
        handle = DeltaTable(store.uri(folder), storage_options=store.storage_options)
    except TableNotFoundError:
        return []
    rows: list[dict[str, Any]] = read_files(handle, store, folder).to_pylist()
    return rows


def raw_rows(lake: Path | str, table: TableId, source: str = "shop") -> list[dict[str, Any]]:
    """Return all rows of a raw table, in any order; empty while it does not exist.

    (Its folder exists shortly before the table does.)
    """
    try:
        rows: list[dict[str, Any]] = read_raw(str(lake), source, table).to_pylist()
    except TableNotFoundError:
        return []
    return rows


def changes(
    lake: Path | str, tables: Iterable[TableId], source: str = "shop"
) -> list[tuple[int, int, int, str]]:
    """All streamed changes of these tables: (_cdc_lsn, _cdc_seq, _cdc_epoch, table), sorted."""
    found = []
    for table in tables:
        try:
            raw = read_raw(str(lake), source, table)
        except TableNotFoundError:
            continue
        columns = raw.select(["_cdc_lsn", "_cdc_seq", "_cdc_epoch"]).to_pylist()
        found += [
            (row["_cdc_lsn"], row["_cdc_seq"], row["_cdc_epoch"], str(table))
            for row in columns
            if row["_cdc_seq"] > 0
        ]
    return sorted(found)


def await_listed(database: Database, lake: Path | str, limit_s: float = 30.0) -> None:
    """Wait until `_epochs` lists the rows of raw tables, which a daemon commits first.

    For tests that watch raw tables; a test that waits for a slot does not need it (I1).
    """
    with database.connect() as connection:
        tables = source_tables(connection)
    newest = max((epoch for _, _, epoch, _ in changes(lake, tables)), default=0)
    _await_listed_epoch(lake, newest, "shop", limit_s)


def _await_listed_epoch(lake: Path | str, newest: int, source: str, limit_s: float) -> None:
    def is_listed() -> bool:
        return max((row["epoch"] for row in epochs(lake, source)), default=0) >= newest

    await_until(is_listed, limit_s, f"epoch {newest} of raw tables to be in _epochs")


def assert_change_log_is_sound(
    database: Database,
    lake: Path | str,
    source: str = "shop",
    *,
    is_dense: bool = True,
    torn_epoch: int | None = None,
) -> set[int]:
    """I2, I3: positions are unique and dense, epochs have no gaps and split no transaction.

    `is_dense`: False if tables were dropped before all their changes were read, or listed in
    `_epochs`. A replay after a kill no longer counts the changes of such a table, so a change of
    another table may then have a position that a change of the dropped table had.

    `torn_epoch`: the slot was lost while only some tables' parts of this epoch were durable. All
    tables are then re-read, which voids these transactions. Returns the commit LSNs of those that
    lack changes.
    """
    with database.connect() as connection:
        tables = source_tables(connection)
    seqs: dict[int, list[int]] = defaultdict(list)
    epoch_of: dict[int, set[int]] = defaultdict(set)
    found = changes(lake, tables, source)
    per_table = [(lsn, seq, table) for lsn, seq, _, table in found]
    assert len(per_table) == len(set(per_table)), "a change is in the lake twice"
    staying_at: dict[int, list[int]] = defaultdict(list)
    went = set() if is_dense else _went(lake, source)
    for lsn, seq, epoch, table in found:
        seqs[lsn].append(seq)
        epoch_of[lsn].add(epoch)
        if table not in went:
            staying_at[lsn].append(seq)
    torn: dict[int, list[int]] = {}
    for lsn, present in seqs.items():
        dense = set(range(1, len(present) + 1))
        staying = sorted(staying_at[lsn])
        assert len(set(staying)) == len(staying), f"changes of {lsn} are doubled: {staying}"
        if is_dense and set(present) != dense:
            torn[lsn] = present
    split = {lsn: sorted(numbers) for lsn, numbers in epoch_of.items() if len(numbers) > 1}
    assert not split, f"transactions split over epochs: {split}"
    for lsn, present in torn.items():
        assert epoch_of[lsn] == {torn_epoch}, f"changes of {lsn} are missing: {present}"
    if torn:
        void_below = min(_read_anew_at(lake, table, source) for table in tables)
        assert max(torn) < void_below, f"changes are missing, and not void: {torn}"
    # A running daemon commits an epoch's tables before it lists the epoch.
    _await_listed_epoch(lake, max(map(max, epoch_of.values()), default=0), source, 30.0)
    _assert_epochs_cover(epochs(lake, source), epoch_of, is_dense=is_dense)
    return set(torn)


def _read_anew_at(lake: Path | str, table: TableId, source: str) -> int:
    """Return the position of a table's newest snapshot, below which its rows are void."""
    rows = raw_rows(lake, table, source)
    return max((int(row["_cdc_lsn"]) for row in rows if row["_cdc_seq"] == -1), default=0)


def _went(lake: Path | str, source: str) -> set[str]:
    """Return the tables that were dropped, renamed or re-created at some time."""
    oids: dict[str, set[int]] = defaultdict(set)
    for event in registry(lake, source):
        oids[event["table"]].add(event["oid"])
    return {table for table, found in oids.items() if len(found) > 1}


def _assert_epochs_cover(
    rows: list[dict[str, Any]], epoch_of: dict[int, set[int]], *, is_dense: bool
) -> None:
    numbers = [row["epoch"] for row in rows]
    assert numbers == list(range(1, len(numbers) + 1)), f"epochs have gaps: {numbers}"
    ends = [row["end_lsn"] for row in rows]
    assert ends == sorted(ends), "an epoch ends before the one before it"
    by_number = {row["epoch"]: row for row in rows}
    for lsn, [number] in epoch_of.items():
        assert number in by_number, f"change at {lsn} of epoch {number}, which _epochs lacks"
        row = by_number[number]
        before = by_number.get(number - 1, {"end_lsn": 0})
        first = row["first_lsn"] if is_dense else before["end_lsn"]
        assert first <= lsn < row["end_lsn"], f"change at {lsn} is outside {row}"
