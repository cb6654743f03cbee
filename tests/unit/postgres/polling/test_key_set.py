"""Hashes of keys; sets of keys against sets."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.digests.row_digests import key_digests
from ingestd.digests.value_hashes import column_hashes
from ingestd.model.changes import TableBatch
from ingestd.model.schema import TIMESTAMP, Column, Table, TableId
from ingestd.postgres.polling.keys import sorted_hashes
from ingestd.postgres.polling.keys.key_hashes import key_hashes, lasting_hashes
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.polling.keys.lake_keys import parts_held
from tests.harness.colliding import pair_like, texts_of_one_hash
from tests.harness.examples import examples

RAW = pa.map_(pa.string(), pa.string())


def table_of(*types: pa.DataType) -> Table:
    columns = tuple(
        Column(f"k{i}", 25, -1, kind, identity=True, stored_as=f"k{i}__v2" if i else None)
        for i, kind in enumerate(types)
    )
    names = tuple(c.name for c in columns)
    return Table(TableId("public", "t"), 1, columns, "d", names, names)


def rows_of(
    columns: Sequence[pa.Array], raw: Sequence[dict[str, str] | None] | None = None
) -> pa.RecordBatch:
    names = [f"k{i}__v2" if i else "k0" for i in range(len(columns))]
    kept = [None] * len(columns[0]) if raw is None else raw
    texts = pa.array([None if r is None else list(r.items()) for r in kept], RAW)
    return pa.RecordBatch.from_arrays([*columns, texts], names=[*names, "_cdc_raw"])


# --- hashes of keys ---------------------------------------------------------------------------

TEXTS = st.text("az09 äß€𝄞\0", max_size=40)


def hashes_of_keys(*columns: pa.Array) -> list[int]:
    found: list[int] = key_hashes(table_of(*(c.type for c in columns)), rows_of(columns)).tolist()
    return found


@given(st.lists(st.tuples(st.integers(0, 99), st.none() | TEXTS), min_size=1))
def test_values_outside_their_column_type_hash_as_text(
    values: list[tuple[int, str | None]],
) -> None:
    first = pa.array([number for number, _ in values], pa.int32())
    second = pa.array([None if text else 0 for _, text in values], TIMESTAMP)
    raw = [{"other": "x", "k1__v2": text} if text else None for _, text in values]
    found = key_hashes(table_of(pa.int32(), TIMESTAMP), rows_of([first, second], raw)).tolist()
    texts = pa.array([text for _, text in values], pa.string())
    as_texts, as_times = hashes_of_keys(first, texts), hashes_of_keys(first, second)
    texts_and_times = zip(values, as_texts, as_times, strict=True)
    assert found == [text if value else time for (_, value), text, time in texts_and_times]


def test_composite_keys_differ_by_order_and_boundaries() -> None:
    pairs = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", "a"), ("b", "b")]
    columns = [pa.array(c, pa.string()) for c in zip(*pairs, strict=True)]
    assert len(set(hashes_of_keys(*columns))) == len(pairs)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_what_postgres_calls_equal_has_one_hash(kind: pa.DataType) -> None:
    values = pa.array([0.0, -0.0, math.nan, -math.nan, None, 1.0], kind)
    zero, negative, first, second, *others = hashes_of_keys(values)
    assert zero == negative
    assert first == second
    assert len({zero, first, *others}) == 4
    assert hashes_of_keys(values.dictionary_encode()) == hashes_of_keys(values)


@given(
    st.lists(st.floats() | st.none(), min_size=1),
    st.lists(st.integers(-3, 3) | st.none(), min_size=1),
)
def test_polling_and_verify_hash_keys_alike(floats: list[Any], integers: list[Any]) -> None:
    rows = min(len(floats), len(integers))
    columns = [pa.array(floats[:rows], pa.float64()), pa.array(integers[:rows], pa.int32())]
    digests = key_digests(((column_hashes(c), c.type) for c in columns), rows)
    found = lasting_hashes(table_of(*(c.type for c in columns)), rows_of(columns), salt=0)
    assert found.tolist() == digests.tolist()


ALIKE = {
    "texts": [pa.array(texts_of_one_hash())],
    "bytes": [pa.array(texts_of_one_hash()).cast(pa.binary())],
    "pairs": [pa.array([1, 2]), pa.array([7, pair_like(1, 7, 2)])],
}
"""Two keys, of which a client chose the second one to have the hash of the first."""


@pytest.mark.attack("table owner")
@pytest.mark.parametrize("columns", ALIKE.values(), ids=ALIKE)
def test_a_client_can_t_choose_a_key_like_another(columns: list[pa.Array]) -> None:
    """A row was never found deleted while the other key existed, or once that was deleted."""
    table, rows = table_of(*(c.type for c in columns)), rows_of(columns)
    first, second = key_hashes(table, rows)
    keys = KeySet(np.unique([first]))
    assert keys.holds(np.array([first, second])).tolist() == [True, False]


def test_nested_keys_hash_by_their_texts() -> None:
    lists = pa.array([[1, 2], [1], [1, 2], None], pa.list_(pa.int32()))
    assert hashes_of_keys(lists) == hashes_of_keys(pa.array(["[1, 2]", "[1]", "[1, 2]", None]))


# --- sorted arrays ----------------------------------------------------------------------------

HASHES = st.sets(st.integers(0, 400), max_size=60)


def hashes_of(values: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(sorted(values), np.uint64)


@given(HASHES, HASHES, st.integers(1, 7))
def test_sorted_hashes_change_in_place_block_by_block(
    there: set[int], others: set[int], block: int
) -> None:
    array = hashes_of(there)
    sorted_hashes.add(array, hashes_of(others - there), block_size=block)
    assert array.tolist() == sorted(there | others)
    sorted_hashes.remove(array, hashes_of(others), block_size=block)
    assert array.tolist() == sorted(there - others)


@given(st.lists(st.integers(0, 50)), st.integers(1, 7), st.integers(0, 5))
def test_distinct_leaves_each_once(values: list[int], block: int, more: int) -> None:
    array = np.array([*values, *[0] * more], np.uint64)
    count = sorted_hashes.distinct(array, len(values), block_size=block)
    assert array[:count].tolist() == sorted(set(values))


# --- the set ----------------------------------------------------------------------------------

TABLE = table_of(pa.int64())

Change = tuple[str, int]
"""Op and key."""


def change_rows(changes: Sequence[Change], places: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    ids = pa.array([None if op == "t" else key for op, key in changes], pa.int64())
    return pa.RecordBatch.from_pydict(
        {
            "k0": ids,
            "_cdc_op": pa.array([op for op, _ in changes], pa.string()),
            "_cdc_lsn": pa.array([lsn for lsn, _ in places], pa.int64()),
            "_cdc_seq": pa.array([seq for _, seq in places], pa.int64()),
            "_cdc_epoch": pa.array([1] * len(changes), pa.int64()),
            "_cdc_raw": pa.nulls(len(changes), RAW),
        }
    )


def change_batch(changes: Sequence[Change]) -> TableBatch:
    return TableBatch(TABLE, change_rows(changes, [(0, 0)] * len(changes)), 0)


def fold(changes: Sequence[Change], held: set[int]) -> set[int]:
    held = set(held)
    for op, key in changes:
        match op:
            case "t":
                held.clear()
            case "d":
                held.discard(key)
            case _:
                held.add(key)
    return held


CHANGES = st.lists(st.tuples(st.sampled_from("rccuuddt"), st.integers(0, 12)), max_size=8)


def held_of(keys: KeySet) -> set[int]:
    everything = [("c", key) for key in range(70)]
    flags = keys.contains(change_batch(everything))
    return {key for key, is_held in enumerate(flags) if is_held}


@given(st.lists(CHANGES, max_size=8), st.integers(0, 4), st.sets(st.integers(0, 9)))
def test_a_set_holds_what_its_changes_leave(
    batches: list[list[Change]], few: int, still: set[int]
) -> None:
    """In any order of merges, and while a sweep reads it."""
    expected: set[int] = set()
    keys = KeySet(few=few)
    for number, batch in enumerate(batches):
        if number in still:
            with keys.still() as hashes:
                before = hashes.tolist()
                keys.apply_changes(change_batch(batch))
                assert hashes.tolist() == before
        else:
            keys.apply_changes(change_batch(batch))
        expected = fold(batch, expected)
        assert held_of(keys) == expected
    assert len(keys) == len(expected)
    with keys.still() as hashes:
        assert hashes.tolist() == sorted(hashes_of_keys(pa.array(sorted(expected), pa.int64())))


@dataclass
class Log:
    """A lake's changes; `epochs`: the last visible one, one more at each read."""

    batches: Sequence[pa.RecordBatch]
    later: pa.RecordBatch | None = None
    readings: int = 0

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        assert table == TABLE.id
        self.readings += 1
        for batch in self.batches:
            yield batch.select([n for n in columns if n in batch.schema.names])
        if self.later is not None and self.readings > 1:
            yield self.later.select(columns)


@st.composite
def logs(
    draw: st.DrawFn, *, ops: str = "rccuuddt", least: int = 0, top: int = 9
) -> tuple[set[int], list[pa.RecordBatch]]:
    """Changes at growing positions, in any order; and what they leave."""
    one = st.tuples(st.sampled_from(ops), st.integers(0, top))
    changes = draw(st.lists(one, min_size=least, max_size=least + 24))
    steps = draw(st.lists(st.booleans(), min_size=len(changes), max_size=len(changes)))
    places, lsn, seq = [], 5, -2
    for is_next in steps:
        lsn, seq = (lsn + 1, -1) if is_next else (lsn, seq + 1)
        places.append((lsn, seq))
    held = fold(changes, set())
    order = draw(st.permutations(range(len(changes))))
    at = draw(st.integers(0, len(changes)))
    batches = [
        change_rows([changes[i] for i in part], [places[i] for i in part])
        for part in (order[:at], order[at:])
    ]
    return held, batches


@given(logs())
async def test_loading_finds_what_the_changes_leave_in_any_order(
    drawn: tuple[set[int], list[pa.RecordBatch]],
) -> None:
    held, batches = drawn
    keys = await KeySet.load(Log(batches), TABLE, limit_bytes=1 << 20)
    assert keys is not None
    assert held_of(keys) == held
    assert keys.nbytes == 8 * len(held)


@examples(25)
@given(logs(ops="rcucucd", least=100, top=60), st.integers(256, 400))
async def test_keys_that_do_not_fit_are_found_part_by_part(
    drawn: tuple[set[int], list[pa.RecordBatch]], limit_bytes: int
) -> None:
    held, batches = drawn
    found = [h async for _, h in parts_held(Log(batches), TABLE, limit_bytes, least_bytes=256)]
    assert sorted(x for part in found for x in part.tolist()) == sorted(
        hashes_of_keys(pa.array(sorted(held), pa.int64()))
    )
    assert all(part.tolist() == sorted(part.tolist()) for part in found)
    assert all(part.nbytes <= limit_bytes for part in found)
    keys = await KeySet.load(Log(batches), TABLE, limit_bytes=limit_bytes, least_bytes=256)
    assert keys is None or held_of(keys) == held
    if 8 * len(held) > limit_bytes:
        assert keys is None


async def test_loading_stops_at_the_epoch_it_began_at() -> None:
    first = change_rows([("c", 1), ("c", 2), ("d", 3)], [(10, 1), (10, 2), (10, 3)])
    later = change_rows([("d", 1), ("c", 5)], [(20, 1), (20, 2)])
    at = later.schema.get_field_index("_cdc_epoch")
    later = later.set_column(at, "_cdc_epoch", pa.array([2, 2], pa.int64()))
    keys = await KeySet.load(Log([first], later), TABLE, limit_bytes=1 << 20)
    assert keys is not None
    assert held_of(keys) == {1, 2}


@pytest.mark.parametrize("rows", [[], [change_rows([("r", 1)], [(1, 0)]).drop_columns(["k0"])]])
async def test_a_table_or_key_that_the_lake_has_not_holds_no_key(
    rows: Sequence[pa.RecordBatch],
) -> None:
    keys = await KeySet.load(Log(rows), TABLE, limit_bytes=1 << 20)
    assert keys is not None
    assert len(keys) == 0
