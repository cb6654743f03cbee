"""Texts of statements: whatever a name or a value contains, it stays one name or value."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from spark_jobs.delta_log.statements import (
    add_columns,
    at_path,
    cluster,
    create,
    insert_unmatched,
    literal,
    quoted,
    set_properties,
    update,
    update_matched,
)

ODD = [
    "a",
    "a b",
    "a`b",
    "``",
    "a'b",
    "a\\",
    'a"b',
    "a.b",
    "${env:HOME}",
    "ä\n--",
    "; DROP TABLE x",
]
_TOKEN = re.compile(r"`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|X'[0-9a-f]*'", re.DOTALL)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_stays_one_name(name: str) -> None:
    """Without its quoted parts, a statement is the same for all names."""
    made = [
        create(name, {name: "long"}, {name: name}, clustering=[name]),
        cluster(name, [name]),
        add_columns(name, {name: "long"}),
        set_properties(name, {name: name}),
        update(name, {name: quoted(name)}, "true"),
        update_matched({name: quoted(name)}, "true"),
        insert_unmatched({name: quoted(name)}, "true"),
        at_path(name),
    ]
    plain = [
        create("x", {"x": "long"}, {"x": "x"}, clustering=["x"]),
        cluster("x", ["x"]),
        add_columns("x", {"x": "long"}),
        set_properties("x", {"x": "x"}),
        update("x", {"x": "`x`"}, "true"),
        update_matched({"x": "`x`"}, "true"),
        insert_unmatched({"x": "`x`"}, "true"),
        at_path("x"),
    ]
    assert [_TOKEN.sub("?", text) for text in made] == [_TOKEN.sub("?", text) for text in plain]


@pytest.mark.parametrize("text", ODD)
def test_a_text_is_plain_or_its_bytes(text: str) -> None:
    found = literal(text)
    as_bytes = re.fullmatch(r"decode\(X'([0-9a-f]*)', 'UTF-8'\)", found)
    assert (bytes.fromhex(as_bytes[1]).decode() if as_bytes else found[1:-1]) == text
    assert as_bytes or not set("'\\$") & set(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (True, "true"),
        (-9223372036854775808, "-9223372036854775808"),
        (1e-05, "'1e-05'"),
        (Decimal("1E-9"), "'1E-9'"),
        (b"\x00'", "X'0027'"),
        (date(1, 2, 3), "DATE '0001-02-03'"),
        (datetime(1, 2, 3, 4, 5, 6, 7, UTC), "'0001-02-03 04:05:06.000007+00:00'"),
        ([1, None, [False]], "array(1, NULL, array(false))"),
        ([], "array()"),
    ],
)
def test_values_of_other_kinds(value: object, text: str) -> None:
    assert literal(value) == text
