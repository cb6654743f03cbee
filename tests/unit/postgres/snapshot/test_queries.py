"""What a snapshot's queries read, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.config import TableSettings
from ingestd.decode.copy.packing import Packing
from ingestd.decode.type_mapping import BUILT_IN, lake_type
from ingestd.model.schema import Column, Table, TableId, with_before
from ingestd.postgres.captured.columns import controlled
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.snapshot.queries import columns_query, rows_query

KINDS = {"id": 23, "born": 1082, "photo": 17, "salary": 1700, "note": 25}
PEOPLE = with_before(
    Table(
        TableId("public", "people"),
        7,
        tuple(
            Column(name, oid, -1, lake_type(oid, -1), identity=name == "id", nullable=name != "id")
            for name, oid in KINDS.items()
        ),
        key=("id",),
    ),
    full=False,
)
BLOCKS = [
    BlockRange("public", "people"),
    BlockRange("public", "people", 0, 100),
    BlockRange("public", "people", 100),
    BlockRange("public", "people", is_whole=True),
]


def queries(table: Table, blocks: BlockRange) -> list[str]:
    packed = [columns_query(table, blocks, 64, packing) for packing in Packing]
    return [query.as_string(None) for query in (rows_query(table, blocks), *packed)]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    "controls",
    [
        {"exclude_columns": ["born", "photo", "salary", "note"]},
        {"mask_columns": dict.fromkeys(("born", "photo", "salary", "note"), "null")},
    ],
)
def test_what_is_hidden_is_not_read(controls: dict[str, object], blocks: BlockRange) -> None:
    table = controlled(PEOPLE, TableSettings.model_validate(controls), None, BUILT_IN)
    for query in queries(table, blocks):
        for name in ("born", "photo", "salary", "note"):
            assert f'"{name}"' not in query
        assert '"id"' in query


@pytest.mark.parametrize("blocks", BLOCKS)
def test_rows_are_those_that_the_publication_sends(blocks: BlockRange) -> None:
    table = replace(PEOPLE, row_filter="((id > 5) OR (note ~~ '%{}x'::text))")
    bounds = (blocks.start > 0) + (blocks.end is not None)
    for query, conditions in zip(queries(table, blocks), (bounds, 2, 2), strict=True):
        where = query.split(" WHERE ", 1)[1]
        assert where.count(" AND ") == conditions
        assert "(((id > 5) OR (note ~~ '%{}x'::text)))" in where
