"""The keys of a sweep fit into parts, whichever keys a client of the source has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.polling.keys.key_hashes import key_hashes
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition, parts_held
from tests.harness.colliding import integers_of_multiples, texts_of_same_hash

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

pytestmark = pytest.mark.attack("table owner")

KEYS, LIMIT_BYTES = 300, 8 * 64


class Log:
    """A lake with one row of each key."""

    def __init__(self, ids: pa.Array) -> None:
        count = len(ids)
        raw = pa.nulls(count, pa.map_(pa.string(), pa.string()))
        self.rows = pa.record_batch(
            {
                "id": ids,
                "_cdc_raw": raw,
                "_cdc_op": ["c"] * count,
                "_cdc_lsn": [1] * count,
                "_cdc_seq": range(count),
                "_cdc_epoch": [1] * count,
            }
        )

    async def changes(
        self, _: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        yield self.rows.select(list(columns))


@pytest.mark.parametrize("kind", ["texts", "numbers"])
async def test_chosen_keys_are_in_several_parts(kind: str) -> None:
    """Of texts that have one hash, a part never fitted, and the sweep never ended."""
    many = KEYS // 3
    chosen = integers_of_multiples(1 << 20, many) if kind == "numbers" else texts_of_same_hash(many)
    column = pa.array(chosen)
    table = Table(
        TableId("public", "t"), 1, (Column("id", 25, -1, column.type),), "d", ("id",), ("id",)
    )
    log, found, last = Log(column), [], WHOLE
    async for partition, hashes in parts_held(log, table, LIMIT_BYTES, least_bytes=LIMIT_BYTES):
        assert len(hashes) * 8 <= LIMIT_BYTES
        found.append(hashes)
        last = partition
    assert 2 <= last.count <= 16
    wanted = np.sort(key_hashes(table, log.rows))
    assert np.sort(np.concatenate(found)).tolist() == wanted.tolist()
    # a later process continues with the last part
    again = [h async for _, h in parts_held(log, table, LIMIT_BYTES, last, least_bytes=LIMIT_BYTES)]
    assert again[0].tolist() == found[-1].tolist()
    assert KeyPartition(last.number, last.count, last.salt) == last
