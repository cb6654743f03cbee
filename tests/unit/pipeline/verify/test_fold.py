"""Changes folded by numbers alone, against the fold that goes row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.digests.row_digests import ComparedColumn, key_digests, row_digests, value_hashes
from ingestd.lake.fold.plain import fold
from ingestd.lake.verify.change_digests import digest_changes, lazy_columns, linked_keys
from ingestd.model.schema import Column, Table, TableId
from ingestd.pipeline.verify.fold import fold_digests, fold_linked
from ingestd.pipeline.verify.spill import NumberPartitions, partition_of
from ingestd.ports.verify import KEY, Digested
from tests.harness.examples import examples
from tests.unit.lake.rows import make_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ingestd.digests.value_hashes import Hashes

SALT = 12_345
KEYED = Table(
    TableId("public", "t"),
    1,
    (
        Column("a", 23, -1, pa.int32(), identity=True),
        Column("b", 25, -1, pa.string(), identity=True),
        Column("note", 25, -1, pa.string()),
        Column("big", 25, -1, pa.string()),
    ),
    key=("a", "b"),
    before=("a", "b"),
)
WIDE = replace(KEYED, before=("a", "b", "note", "big"))
"""Once of REPLICA IDENTITY FULL: its old rows have room for columns that are not sent any more."""
WHOLE = Table(
    TableId("public", "w"),
    2,
    (Column("a", 23, -1, pa.int32()), Column("note", 25, -1, pa.string())),
    replica_identity="f",
    before=("a", "note"),
)
Rows = list[dict[str, Any]]


def digested(table: Table, batches: list[pa.RecordBatch]) -> Digested:
    """What a survey of these changes finds."""
    columns = tuple(ComparedColumn(c.name, (c.name,), c.type) for c in table.columns)
    key = tuple(i for i, c in enumerate(columns) if c.name in table.identifying)
    found = Digested(table, columns, key)
    if not key:
        return found
    lazy = set[int]().union(*(lazy_columns(b.column("_cdc_unchanged"), columns) for b in batches))
    linked = np.unique(np.concatenate([linked_keys(b, columns, key).ravel() for b in batches]))
    return Digested(table, columns, key, tuple(sorted(lazy - set(key))), linked)


def is_in(number: int, partitions: int, keys: Hashes) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = partition_of(keys, partitions, SALT) == number
    return found


def by_numbers(
    table: Table, log: Rows, *, pieces: int, partitions: int
) -> tuple[Counter[int], int]:
    """Fold in partitions, changes coming in pieces: rows as numbers, and how many are doubled."""
    size = max(1, -(-len(log) // pieces))
    batches = [make_batch(table, log[i : i + size]).rows for i in range(0, len(log), size)]
    if not batches:
        return Counter(), 0
    how = digested(table, batches)
    rows: Counter[int] = Counter()
    doubled = 0
    with NumberPartitions(partitions + 1, how.width, 200) as held:
        for batch in batches:
            matrix = digest_changes(batch, how)
            place = partition_of(matrix[:, KEY], partitions, SALT)
            place[how.is_linked(matrix[:, KEY])] = partitions
            held.add_rows(matrix, place)
        linked = fold_linked(held.pop_partition(partitions), how)
        for number in range(partitions):
            own = linked.among(partial(is_in, number, partitions))
            folded = fold_digests(held.pop_partition(number), how).plus(own)
            assert sorted(folded.keys.tolist()) == folded.keys.tolist()
            rows.update(folded.rows.tolist())
            doubled += len(folded.doubled)
    return rows, doubled


def plain(table: Table, log: Rows) -> Counter[int]:
    rows = fold(pa.Table.from_batches([make_batch(table, log).rows]), list(table.identifying))
    hashes: dict[int, Hashes] = {
        i: value_hashes([r[c.name] for r in rows], c.type) for i, c in enumerate(table.columns)
    }
    return Counter(row_digests(hashes, len(rows)).tolist())


@st.composite
def keyed_logs(draw: st.DrawFn, *, may_be_full: bool = False) -> Rows:
    """What a server logs: keys that move, values that were not sent.

    `may_be_full`: some changes have complete old rows (REPLICA IDENTITY FULL, for a time).
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    log: Rows = []
    for number in range(draw(st.integers(1, 30))):
        place = {"_cdc_lsn": number // 3, "_cdc_seq": number % 3 + 1}
        key = (draw(st.integers(0, 2)), draw(st.sampled_from("xy")))
        values = {n: draw(st.sampled_from([None, "n", "m"])) for n in ("note", "big")}
        action = draw(st.sampled_from(["write", "write", "move", "move", "delete"]))
        old = rows.pop(key, None)
        own = dict(zip("ab", key, strict=True))
        if action == "delete":
            if old is not None:
                log.append({**own, **place, "_cdc_op": "d"})
            continue
        if old is None:
            rows[key] = {**own, **values}
            log.append({**rows[key], **place, "_cdc_op": "c"})
            continue
        to = (draw(st.integers(0, 2)), key[1]) if action == "move" else key
        if to in rows:
            rows[key] = old
            continue
        unsent = draw(st.sets(st.sampled_from(["note", "big"])))
        new = dict(zip("ab", to, strict=True))
        rows[to] = {**new, **values, **{n: old[n] for n in unsent}}
        sent = {n: None if n in unsent else v for n, v in values.items()}
        before = own if to != key or draw(st.booleans()) else None
        if before is not None and may_be_full and draw(st.booleans()):
            before = {**own, **{n: old[n] for n in ("note", "big")}}
        extra = {"_cdc_before": before, "_cdc_unchanged": sorted(unsent) or None}
        log.append({**new, **sent, **extra, **place, "_cdc_op": "u"})
    return log


@pytest.mark.thorough
@examples(120)
@given(keyed_logs(), st.integers(1, 3), st.sampled_from([1, 4]), st.randoms())
def test_keyed_rows_are_those_of_the_plain_fold(
    log: Rows, pieces: int, partitions: int, random: Any
) -> None:
    shuffled = list(log)
    random.shuffle(shuffled)
    assert by_numbers(KEYED, shuffled, pieces=pieces, partitions=partitions) == (
        plain(KEYED, log),
        0,
    )


@pytest.mark.slow
@examples(120)
@given(keyed_logs(may_be_full=True), st.integers(1, 3), st.sampled_from([1, 4]))
def test_old_rows_with_room_for_what_was_not_sent(log: Rows, pieces: int, partitions: int) -> None:
    """A compacted file has the table's struct for old rows, whichever fields each had."""
    assert by_numbers(WIDE, log, pieces=pieces, partitions=partitions) == (plain(WIDE, log), 0)


@examples(60)
@given(keyed_logs(), st.data(), st.sampled_from([KEYED, WIDE]))
def test_a_log_that_lost_changes_is_folded_alike(
    log: Rows, data: st.DataObject, table: Table
) -> None:
    """Damage of any kind must not hide behind another reading of it."""
    lost = data.draw(st.sets(st.integers(0, max(0, len(log) - 1)), max_size=4))
    left = [row for i, row in enumerate(log) if i not in lost]
    if left:
        assert by_numbers(table, left, pieces=2, partitions=4) == (plain(table, left), 0)


@examples(60)
@given(keyed_logs(), st.data())
def test_doubled_changes_are_counted(log: Rows, data: st.DataObject) -> None:
    if not log:
        return
    again = data.draw(st.lists(st.integers(0, len(log) - 1), max_size=3))
    log = [*log, *(log[i] for i in again)]
    rows, doubled = by_numbers(KEYED, log, pieces=2, partitions=4)
    moved = sum(log[i]["_cdc_op"] == "u" for i in again)  # each may be two
    assert len(again) <= doubled <= len(again) + moved
    assert rows == plain(KEYED, log)


@st.composite
def whole_logs(draw: st.DrawFn) -> Rows:
    """Rows without a key: also removals of rows that do not exist."""
    log: Rows = []
    row = st.fixed_dictionaries({"a": st.integers(0, 1), "note": st.sampled_from([None, "n"])})
    for number in range(draw(st.integers(1, 20))):
        place = {"_cdc_lsn": number // 3, "_cdc_seq": number % 3 + 1}
        op = draw(st.sampled_from("ccud"))
        one = draw(row)
        if op == "u":
            before = draw(row)
            unsent = draw(st.booleans())
            sent = {**one, "note": None} if unsent else one
            extra = {"_cdc_before": before, "_cdc_unchanged": ["note"] if unsent else None}
            log.append({**sent, **extra, **place, "_cdc_op": op})
        else:
            log.append({**one, **place, "_cdc_op": op})
    return log


@examples(120)
@given(whole_logs(), st.integers(1, 3), st.sampled_from([1, 4]), st.randoms())
def test_whole_rows_are_those_of_the_plain_fold(
    log: Rows, pieces: int, partitions: int, random: Any
) -> None:
    shuffled = list(log)
    random.shuffle(shuffled)
    assert by_numbers(WHOLE, shuffled, pieces=pieces, partitions=partitions) == (
        plain(WHOLE, log),
        0,
    )


def test_keys_of_several_columns_tell_them_apart() -> None:
    one, other = (value_hashes(["x", "y"], pa.string()), value_hashes(["y", "x"], pa.string()))
    keys = key_digests([(one, pa.string()), (other, pa.string())], 2)
    assert keys[0] != keys[1]
