"""Partitions in files: all rows, in bounded memory, and linked keys together."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import ingestd
from ingestd.digests.value_hashes import HashBlocks
from ingestd.lake.fold.raw_texts import NAMES_TYPE, RAW_TYPE
from ingestd.lake.fold.vectorized import fold_to_outcomes
from ingestd.lake.reference.raw_changes import key_hashes
from ingestd.reading.key_partitions import KeyPartitions, PartitionHashes
from tests.harness.colliding import integers_of_multiples
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

BEFORE = pa.struct([("id", pa.int64())])
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("note", pa.string()),
        ("_cdc_op", pa.string()),
        ("_cdc_lsn", pa.int64()),
        ("_cdc_seq", pa.int64()),
        ("_cdc_unchanged", NAMES_TYPE),
        ("_cdc_before", BEFORE),
        ("_cdc_raw", RAW_TYPE),
    ]
)
LARGE = "x" * 10_000
BUDGET_BYTES = 1 << 20


def rows(*ids: int, lsn: int, **more: object) -> pa.Table:
    place = {"_cdc_op": "u", "_cdc_seq": 1, "_cdc_lsn": lsn, "note": LARGE, **more}
    return pa.Table.from_pylist([{"id": n, **place} for n in ids], SCHEMA)


def test_a_row_of_many_versions_needs_no_more_memory(tmp_path: Path) -> None:
    """20 MB of versions of one row, in any order."""
    hashes = PartitionHashes(["id"], [])
    largest = 0

    def reduced(found: pa.Table) -> pa.Table:
        nonlocal largest
        largest = max(largest, found.nbytes)
        return hashes.reduced(found)

    partitions = KeyPartitions(
        SCHEMA,
        hashes,
        reduced,
        expected_rows=2_000,
        memory_bytes=BUDGET_BYTES,
        folder=str(tmp_path),
    )
    order = np.random.default_rng(1).permutation(2_000)
    for lsn in order.tolist():
        partitions.add_rows(rows(7, lsn=lsn))
    partitions.add_rows(rows(8, lsn=5))
    found = pa.concat_tables(partitions.tables())
    partitions.close()
    assert largest < BUDGET_BYTES
    newest = {row["id"]: row["_cdc_lsn"] for row in found.sort_by("_cdc_lsn").to_pylist()}
    assert newest == {7: 1_999, 8: 5}
    assert list(tmp_path.iterdir()) == []


def test_what_an_unsent_value_needs_is_kept() -> None:
    unsent = {"_cdc_unchanged": ["note"], "note": None}
    log = [
        rows(1, lsn=1),
        rows(1, lsn=2),
        rows(1, lsn=3, **unsent),
        rows(2, lsn=1, _cdc_op="d"),
        rows(2, lsn=0),
        rows(4, lsn=4, _cdc_before={"id": 3}),
        rows(4, lsn=5),
    ]
    found = PartitionHashes(["id"], []).reduced(pa.concat_tables(log))
    places = [(r["id"], r["_cdc_lsn"]) for r in found.to_pylist()]
    assert places == [(1, 2), (1, 3), (2, 1), (4, 4), (4, 5)]
    folded = fold_to_outcomes(found, ["id", "note"], ["id"])
    assert folded is not None
    left = folded.outcomes.filter(pc.invert(folded.outcomes["_cdc_deleted"]))
    assert sorted(left["id"].to_pylist()) == [1, 4]


def test_linked_keys_share_a_partition() -> None:
    """A chain of many keys, and one apart."""
    chain = rows(*range(1_000), lsn=1)
    own = key_hashes(chain, ["id"])
    hashes = PartitionHashes(["id"], [np.stack([own[1:], own[:-1]])])
    _, found = hashes(rows(0, 500, 999, 5_000, lsn=1))
    assert len(set(found.tolist())) == 2
    assert found[0] == found[1] == found[2]


@pytest.mark.attack("table owner")
def test_chosen_keys_are_in_all_partitions(tmp_path: Path) -> None:
    """Their hashes without a salt are multiples of each number of partitions that is likely."""
    ids = integers_of_multiples(1 << 20, 2_000)
    hashes = PartitionHashes(["id"], [], HashBlocks.salted())
    partitions = KeyPartitions(
        SCHEMA,
        hashes,
        hashes.reduced,
        expected_rows=2_000,
        memory_bytes=BUDGET_BYTES,
        folder=str(tmp_path),
    )
    for begin in range(0, 2_000, 20):
        partitions.add_rows(rows(*ids[begin : begin + 20], lsn=1))
    sizes = [found.num_rows for found in partitions.tables()]
    partitions.close()
    assert sum(sizes) == 2_000
    assert max(sizes) < 200


def test_a_reader_that_is_abandoned_leaves_no_files(tmp_path: Path) -> None:
    table, lake, spill = make_table("orders"), RawLake(tmp_path / "lake"), tmp_path / "spill"
    spill.mkdir()
    place = {"_cdc_lsn": lake.next_lsn(), "note": "a"}
    lake.commit({table: [{**place, "id": n, "_cdc_seq": n} for n in range(1, 100)]})
    lake.record("live", table, snapshot_lsn=lake.lsn)
    orders = ingestd.open_lake(str(lake.uri)).source("shop").table("public.orders")
    reader = orders.current_batches(memory_bytes=1_000, spill_folder=str(spill))
    assert reader.read_next_batch().num_rows
    assert list(spill.iterdir()) != []
    del reader
    gc.collect()
    assert list(spill.iterdir()) == []
