"""The choice of lake columns to compare with a source's, from `_tables` (design section 2)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.digests.row_digests import ComparedColumn, ComparedValue, DigestedText
from ingestd.lake.fold.older_types import as_newest
from ingestd.model.errors import FolderError, TableChangedError, TableError, resnapshot_command
from ingestd.model.lake_state import TableState
from ingestd.model.schema import Column, Table, lake_type_name

Event = Mapping[str, Any]
"""A row of `_tables`."""
_STRUCT = "struct<"
"""Struct types may contain every field that their column ever had."""


def ensure_comparable(source: str, table: Table, events: Sequence[Event]) -> None:
    """Raise TableError unless the lake has the complete table, with its current key."""
    if not events:
        raise TableChangedError(
            table.id, "is not in the lake yet", remedy="compare it when it is live"
        )
    last = events[-1]
    if last["state"] == TableState.STOPPED:
        raise TableError(
            table.id, f"is stopped: {last['reason']}", remedy="`ingestd check` says what to do"
        )
    if last["state"] != TableState.LIVE:
        raise TableChangedError(
            table.id,
            "is being read by the daemon"
            if last["state"] == TableState.SNAPSHOTTING
            else f"is {last['state']} in the lake",
            remedy="compare it when it is live",
        )
    if last["snapshot_lsn"] is None:
        raise TableError(
            table.id,
            'its rows were never read (snapshot = "never"): the lake has only its changes',
            remedy=f"read them: {resnapshot_command(source, table.id)}",
        )


def ensure_own_types(uri: str, schema: pa.Schema, events: Sequence[Event]) -> None:
    """Raise FolderError if a column has a type that `_tables` never recorded for it."""
    written: dict[str, set[str]] = defaultdict(set)
    for column in itertools.chain.from_iterable(e["columns"] or () for e in events):
        written[column["name"]].add(column["delta_type"])
    for field in schema:
        has, known = _delta_type(field.type), written.get(field.name, set())
        is_grown = _STRUCT in has and any(_STRUCT in each for each in known)
        if known and has not in known and not is_grown:
            expected = " or ".join(sorted(known))
            raise FolderError(
                f"lake table {uri}: another program altered it: column {field.name} was"
                f" {expected} and is {has}"
            )


def _delta_type(kind: pa.DataType) -> str:
    try:
        return lake_type_name(kind)
    except TypeError:  # a type that no raw table has
        return str(kind)


def ensure_known_key(table: Table, events: Sequence[Event]) -> None:
    """Raise TableChangedError if the lake knows the table by other key columns."""
    names = {c.name: c.lake_name for c in table.columns}
    if {names[n] for n in table.identifying} != _key(_described(events)[-1]):
        raise TableChangedError(
            table.id,
            "has another key or replica identity than the lake has recorded so far",
            remedy="compare it again",
        )


def ensure_one_key(source: str, table: Table, events: Sequence[Event], void_lsn: int) -> None:
    """Raise TableError if changes above `void_lsn` identify rows by other columns."""
    pairs = itertools.pairwise(_described(events))
    changed = [b["at_lsn"] for a, b in pairs if _key(a) != _key(b)]
    if changed and changed[-1] > void_lsn:
        raise TableError(
            table.id,
            "has another key or replica identity than when its rows were read",
            remedy=f"re-read it: {resnapshot_command(source, table.id)}",
        )


def compared_columns(
    table: Table, events: Sequence[Event]
) -> tuple[tuple[ComparedColumn, ...], str | None]:
    """Return the columns to compare, and a note of those that the lake does not know yet."""
    described = _described(events)
    found, new = [], []
    for column in table.columns:
        stored = _stored(column, described)
        if column.lake_name in stored:
            found.append(_compared(column, stored, described))
        else:
            new.append(column.name)
    note = None
    if new:
        note = f"not compared, as the lake does not know them yet: {', '.join(new)}"
    return tuple(found), note


def _described(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e["columns"]]


def _compared(column: Column, stored: Sequence[str], described: Sequence[Event]) -> ComparedColumn:
    since, missing = _since(column.name, described)
    return ComparedColumn(
        column.name,
        (*(n for n in stored if n != column.lake_name), column.lake_name),
        column.type,
        column.mask is not None,
        since,
        None if missing is None else _typed(missing, column),
        partial(as_newest, column),
    )


def _stored(column: Column, described: Sequence[Event]) -> list[str]:
    """Return all lake columns that a source column ever had, oldest first."""
    every = (c for event in described for c in event["columns"] if _source(c) == column.name)
    return list(dict.fromkeys(c["name"] for c in every))


def _since(name: str, described: Sequence[Event]) -> tuple[int, str | None]:
    """Return the LSN since which the column exists (0: always), and its value in older rows."""
    since, missing, was_there = 0, None, True
    for event in described:
        column = next((c for c in event["columns"] if _source(c) == name), None)
        if column is not None:
            if not was_there:
                since = event["at_lsn"]
            missing = column["missing"]
        was_there = column is not None
    return since, missing


def _typed(text: str, column: Column) -> ComparedValue:
    data = text.encode()
    texts = TextColumn(ByteBuffer(data), np.zeros(1, np.int64), np.full(1, len(data), np.int64))
    array, refused = cast(texts, column.type, is_override=column.is_override)
    return DigestedText(text) if len(refused) else array[0].as_py()


def _source(column: Mapping[str, Any]) -> str:
    name: str = column.get("source_name") or column["name"]
    return name


def _key(event: Event) -> set[str]:
    flag = "key" if event["replica_identity"] == "f" else "identity"
    return {c["name"] for c in event["columns"] if c.get(flag)}
