"""The text of a table's name: unique, and read back (`_tables`, `_epochs`, app transactions)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.schema import TableId

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
tricky = st.text('".a\n', min_size=1)
ids = st.builds(TableId, names | tricky, names | tricky)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (TableId("public", "orders"), "public.orders"),
        (TableId("public", "a.b"), "public.a.b"),
        (TableId("s.x", "y"), '"s.x".y'),
        (TableId("s", "x.y"), "s.x.y"),
        (TableId('"s', 'x".y'), '"""s".x".y'),
        (TableId('s"x', '"y"'), 's"x."y"'),
        (TableId(".", "."), '"."..'),
        (TableId("Ünï", "a b"), "Ünï.a b"),
    ],
)
def test_the_text_of_a_table(table: TableId, text: str) -> None:
    assert str(table) == text
    assert TableId.parse(text) == table


@given(ids)
def test_parse_is_the_inverse(table: TableId) -> None:
    assert TableId.parse(str(table)) == table


@given(ids, ids)
def test_no_two_tables_have_the_same_text(one: TableId, other: TableId) -> None:
    assert (one == other) == (str(one) == str(other))


def test_a_schema_may_be_quoted_without_need() -> None:
    assert TableId.parse('"public".orders') == TableId("public", "orders")


@pytest.mark.parametrize("text", ["", "orders", ".orders", "public.", '"s.x', '"s"x.y', '"".y'])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema\.table"):
        TableId.parse(text)
