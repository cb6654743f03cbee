from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.catalog_names import MAX_LENGTH, catalog_name
from ingestd.model.schema import TableId

ACCEPTED = re.compile(r"[a-z0-9_]+\Z", re.ASCII)
"""What Hive's metastore, Glue and Unity Catalog all accept and keep apart."""
NAMES = st.text(st.sampled_from("abxO0_ .é"), min_size=1, max_size=6)
TABLES = st.builds(TableId, st.one_of(st.just("public"), NAMES), NAMES)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (TableId("public", "orders"), "orders"),
        (TableId("public", "order_items_2"), "order_items_2"),
        (TableId("sales", "orders"), "sales__orders"),
        (TableId("public", "Orders"), "public__orders__eff3f5f229df97ca07adcd7ffaed7a31"),
        (
            TableId("public", "sales__orders"),
            "public__sales_orders__0da0062876dc16eda5bc1ac70255c585",
        ),
        (TableId("é", "😀"), "x__x__2ef3b1c8e8eed9fe539f0f94927fc476"),
    ],
)
def test_a_name_in_a_catalog(table: TableId, expected: str) -> None:
    assert catalog_name(table) == expected
    assert catalog_name(table, "_ref__") == f"_ref__{expected}"


@given(st.lists(TABLES, min_size=2, max_size=20, unique=True))
def test_no_two_tables_have_the_same_name(tables: list[TableId]) -> None:
    names = [catalog_name(table) for table in tables]
    assert len(set(names)) == len(names)
    assert all(map(ACCEPTED.match, names))


@given(st.text("ab_Z", min_size=50, max_size=63), st.text("ab_Z", min_size=50, max_size=63))
def test_a_name_is_short_enough(schema: str, name: str) -> None:
    assert len(catalog_name(TableId(schema, name), "_ref__")) <= MAX_LENGTH
