"""Which tables are written to, by their features; what another program took away."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ingestd.lake.delta.table_features import NotWritableError, TableTraits, find_obstacle
from ingestd.lake.schema_evolution import lost_fields
from ingestd.lake.store.errors import table_fault
from ingestd.model.schema import TableId

PLAIN = pa.schema([("id", pa.int32()), ("old", pa.struct([("id", pa.int32())]))])
MAPPED = {"delta.columnMapping.mode": "name"}


def traits(
    *features: str,
    version: int = 7,
    schema: pa.Schema = PLAIN,
    configuration: dict[str, str] | None = None,
    partitions: tuple[str, ...] = (),
) -> TableTraits:
    return TableTraits(version, features, schema, configuration or {}, partitions)


def marked(name: str, **options: Any) -> pa.Schema:
    inner = pa.field("b`{}", pa.int32(), metadata={name: "1"}, **options)
    return pa.schema([pa.field("a", pa.struct([inner]))])


@pytest.mark.parametrize(
    "harmless",
    [
        traits(version=1),
        *(traits(version=version) for version in range(2, 6)),
        traits("appendOnly", configuration={"delta.appendOnly": "true"}),
        traits("changeDataFeed", configuration={"delta.enableChangeDataFeed": "true"}),
        traits("columnMapping", "checkConstraints", "invariants"),
        traits("deletionVectors", "v2Checkpoint", "timestampNtz"),
        traits("columnMapping", configuration={"delta.columnMapping.mode": "none"}),
        traits("generatedColumns"),
    ],
)
def test_a_feature_that_asks_nothing_is_no_obstacle(harmless: TableTraits) -> None:
    assert find_obstacle(harmless) is None


@pytest.mark.parametrize(
    ("asks", "what", "undo"),
    [
        (traits("fancy"), "fancy", ""),
        (traits("clustering", "domainMetadata"), "clustering", ""),
        (
            traits("domainMetadata", "rowTracking"),
            "table features domainMetadata, rowTracking",
            "rowTracking; ALTER TABLE delta.`/lake/shop/public/orders` DROP FEATURE domainMetadata",
        ),
        (traits("rowTracking"), "rowTracking", "DROP FEATURE rowTracking"),
        (traits("columnMapping", configuration=MAPPED), "column mapping", "'none'"),
        (traits(version=5, configuration=MAPPED), "column mapping", "'none'"),
        (
            traits(version=3, configuration={"delta.constraints.a{}`": "id > 0"}),
            "CHECK constraint a{}`",
            "DROP CONSTRAINT `a{}```",
        ),
        (traits("inCommitTimestamp"), "inCommitTimestamp", "DROP FEATURE inCommitTimestamp"),
        (
            traits(version=2, schema=marked("x", nullable=False)),
            "a.b`{} is NOT NULL",
            "ALTER COLUMN `a`.`b``{}` DROP NOT NULL",
        ),
        (traits(version=2, schema=marked("delta.invariants")), "has an invariant", ""),
        (traits("columnMapping", "fancy", configuration=MAPPED), "fancy", ""),
        (traits(version=4, schema=marked("delta.generationExpression")), "is generated", ""),
        (traits(version=1, partitions=("id",)), "partitioned by id", ""),
    ],
)
def test_isolated_an_unsupported_feature_is_named_with_its_undo(
    asks: TableTraits, what: str, undo: str
) -> None:
    found = find_obstacle(asks)
    assert found is not None
    assert what in found.what
    error = NotWritableError("/lake/shop/public/orders", found)
    assert undo in error.undo
    assert bool(undo) == bool(error.undo)
    of_table = table_fault(error, "shop", TableId("public", "orders"), "/lake/shop/public/orders")
    assert (of_table.remedy or "").endswith("&& ingestd snapshot shop public.orders")
    assert error.undo in (of_table.remedy or "")


def test_a_table_whose_rows_are_removed_can_have_less() -> None:
    append_only = traits(version=2, configuration={"delta.appendOnly": "true"})
    change_feed = traits("changeDataFeed", configuration={"delta.enableChangeDataFeed": "true"})
    assert find_obstacle(append_only, removes_rows=True) is not None
    assert find_obstacle(change_feed, removes_rows=True) is not None
    assert find_obstacle(traits(version=4), removes_rows=True) is None


def test_lost_fields_are_missing_or_retyped_at_any_depth() -> None:
    def schema(inner: list[tuple[str, pa.DataType]], *more: tuple[str, pa.DataType]) -> pa.Schema:
        struct = pa.struct(inner)
        return pa.schema([("s", struct), ("l", pa.list_(struct)), *more])

    before = schema([("a", pa.int16())], ("x", pa.string()))
    grown = schema([("new", pa.string()), ("a", pa.int16())], ("x", pa.string()), ("y", pa.int8()))
    assert lost_fields(before, grown) == []
    widened = schema([("a", pa.int32())])
    assert lost_fields(before, widened) == [
        "column s.a was short and is integer",
        "column l.element.a was short and is integer",
        "column x is missing",
    ]
