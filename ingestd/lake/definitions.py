"""The definitions of a source's tables in `_tables`, as of a position. Pure.

Source: docs/types.md ("When the table changes").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from ingestd.lake.delta.types import arrow_type
from ingestd.model.errors import FolderError
from ingestd.model.lake_state import TableState
from ingestd.model.recorded_progress import RecordedProgress
from ingestd.model.schema import lake_type_name

_SHOWN = 80
_MOST_TYPE_CHARS = 1 << 18
"""A composite of the most fields that are captured has fewer."""


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A column of a raw table that receives the values of a source column.

    `name` and `delta_type` are the lake's; the latter is a type in SQL and nothing else, whatever
    was recorded. `since_lsn`: rows below it have the text `missing` in
    the source (None: null), whatever is stored in the lake; 0 if no such rows exist. `since`: when
    that was recorded. `is_again`: the source had dropped a column with this name and re-created
    it. The column receives values from `from_lsn` on, up to `until_lsn` (None: still). `identity`:
    it belongs to the replica identity; `key`: to the primary key. `had_other_type`: of the source,
    stored as the same type of the lake. `is_variant`: a Spark job stores
    it as VARIANT (`spark_jobs.lake.variants`).
    """

    name: str
    source_name: str
    delta_type: str
    pg_type: str
    identity: bool
    key: bool
    missing: str | None = None
    since_lsn: int = 0
    comment: str | None = None
    since: datetime | None = None
    is_again: bool = False
    from_lsn: int = 0
    until_lsn: int | None = None
    type_oid: int = 0
    had_other_type: bool = False
    is_variant: bool = False

    def has_values_at(self, lsn: int) -> bool:
        """Return whether rows written at a position have values in this column."""
        return self.from_lsn <= lsn and (self.until_lsn is None or lsn < self.until_lsn)


@dataclass(frozen=True, slots=True)
class Definition:
    """A table as last recorded at a position.

    `columns`: those that the source has. `lives`: each uninterrupted period in which a lake column
    received values, by `since_lsn`, including columns that no longer do (dropped, or replaced by
    one of another type). `is_complete`: the fold of the raw table equals the table. It does not
    before the first snapshot is complete, after a gap, or once the table is stopped or dropped.
    `key_since_lsn`: changes below it may identify their rows by another key; 0 if the key never
    changed.
    """

    table: str
    oid: int
    schema_version: int
    state: TableState
    reason: str | None
    is_complete: bool
    snapshot_lsn: int | None
    columns: tuple[LakeColumn, ...]
    replica_identity: str
    key_since_lsn: int = 0
    lives: tuple[LakeColumn, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """Lake names of the columns that identify a row in changes; empty for a whole row."""
        is_full = self.replica_identity == "f"
        return tuple(c.name for c in self.columns if (c.key if is_full else c.identity))

    @property
    def is_complete_at_every_epoch(self) -> bool:
        """Return whether the fold of the raw table equals the table at every epoch.

        While a table without a key is re-read, it does not: its new rows coexist with the old ones
        until the `t`.
        """
        return self.is_complete and (bool(self.key) or self.state is TableState.LIVE)


class Registry:
    """The rows of `_tables`, in any order."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._events: dict[str, list[Mapping[str, Any]]] = {}
        for row in sorted(rows, key=lambda r: r["at"]):
            self._events.setdefault(row["table"], []).append(row)

    @property
    def tables(self) -> list[str]:
        """Every table that was ever recorded, sorted."""
        return sorted(self._events)

    @property
    def dropped(self) -> list[str]:
        """The tables that the source or the config no longer has, sorted."""
        return [t for t in self.tables if self._events[t][-1]["state"] == TableState.DROPPED]

    def at(self, table: str, lsn: int | None = None) -> Definition | None:
        """Return a table as it was at `lsn` (inclusive; None: now); None if it was unknown."""
        events = [e for e in self._events.get(table, ()) if lsn is None or e["at_lsn"] <= lsn]
        if not events:
            return None
        last = events[-1]
        with_columns = [e for e in events if e["columns"]]
        described = with_columns[-1] if with_columns else last
        state = TableState(last["state"])
        # a table that was live when its snapshot was requested stays complete meanwhile
        serves = RecordedProgress.parse(last["progress"] or "").is_requested
        lives = _lives(with_columns)
        newest = {c.name: c for c in lives if c.until_lsn is None}
        columns = tuple(newest[c["name"]] for c in described["columns"])
        return Definition(
            table=table,
            oid=last["oid"],
            schema_version=described["schema_version"],
            state=state,
            reason=last["reason"],
            is_complete=state is TableState.LIVE or (state is TableState.SNAPSHOTTING and serves),
            snapshot_lsn=last["snapshot_lsn"],
            columns=columns,
            replica_identity=described["replica_identity"],
            key_since_lsn=_key_since(with_columns),
            lives=lives,
        )

    def at_epoch(
        self, table: str, end_lsn: int, is_newest: Callable[[], bool]
    ) -> Definition | None:
        """Return a table as it was at the end of an epoch; None if it was unknown.

        `is_newest`: returns whether no later epoch exists. Then a state above the epoch belongs to
        it. It is called only where that matters, and must read `_epochs` after `_tables` was read.
        """
        found, now = self.at(table, end_lsn), self.at(table)
        if (
            now is not None
            and now != found
            and now.state is TableState.LIVE
            and (now.snapshot_lsn or 0) <= end_lsn
            and is_newest()
        ):
            return now
        return found


def source_name(column: Mapping[str, Any]) -> str:
    """Return the name of the source column whose values a lake column receives."""
    name: str = column.get("source_name") or column["name"]
    return name


def _lives(events: Sequence[Mapping[str, Any]]) -> tuple[LakeColumn, ...]:
    found: list[LakeColumn] = []
    living: dict[str, LakeColumn] = {}
    since: dict[str, tuple[int, datetime | None, bool]] = {}
    before: set[str] = set()
    for number, event in enumerate(events):
        at_lsn = event["at_lsn"] if number else 0
        names = {source_name(c) for c in event["columns"]}
        for name in names - before:
            # (Spark returns local times without a zone)
            at = event["at"].astimezone(UTC) if number else None
            since[name] = (at_lsn, at, name in since)
        before = names
        there = {c["name"]: c for c in event["columns"]}
        found += [replace(c, until_lsn=at_lsn) for n, c in living.items() if n not in there]
        living = {
            name: _column(column, since[source_name(column)], living.get(name), at_lsn)
            for name, column in there.items()
        }
    return tuple(sorted([*found, *living.values()], key=lambda c: c.since_lsn))


def _column(
    column: Mapping[str, Any],
    since: tuple[int, datetime | None, bool],
    before: LakeColumn | None,
    at_lsn: int,
) -> LakeColumn:
    since_lsn, at, is_again = since
    return LakeColumn(
        name=column["name"],
        source_name=source_name(column),
        delta_type=_type_in(column),
        pg_type=column["pg_type"],
        identity=bool(column["identity"]),
        key=bool(column.get("key")),
        missing=column["missing"],
        since_lsn=since_lsn,
        comment=column["comment"],
        since=at,
        is_again=is_again,
        from_lsn=at_lsn if before is None else before.from_lsn,
        type_oid=column["type_oid"],
        had_other_type=before is not None
        and (before.had_other_type or before.type_oid != column["type_oid"]),
    )


def _type_in(column: Mapping[str, Any]) -> str:
    """Return a column's type. Raise FolderError for a text that is none: it becomes part of SQL."""
    try:
        return _type_name(column["delta_type"])
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        name, kind = str(column["name"])[:_SHOWN], str(column["delta_type"])[:_SHOWN]
        raise FolderError(
            f"`_tables` has the column {name!a} with {kind!a}, which is no type: another program"
            " wrote it",
            remedy="put the folder `_tables` of the source back from a copy",
        ) from error


@lru_cache(256)
def _type_name(text: str) -> str:
    if len(text) > _MOST_TYPE_CHARS:
        raise ValueError
    return lake_type_name(arrow_type(text))


def _key_at(event: Mapping[str, Any]) -> tuple[str, ...]:
    of = "key" if event["replica_identity"] == "f" else "identity"
    return tuple(c["name"] for c in event["columns"] if c.get(of))


def _key_since(events: Sequence[Mapping[str, Any]]) -> int:
    """Return the position from which changes identify rows as the last event does."""
    versions = {e["schema_version"]: e for e in reversed(events)}
    events = [versions[n] for n in sorted(versions)]
    keys = list(map(_key_at, events))
    since = 0
    for before, (key, event) in itertools.pairwise(zip(keys, events, strict=True)):
        if key != before[0]:
            since = event["at_lsn"]
    return since
