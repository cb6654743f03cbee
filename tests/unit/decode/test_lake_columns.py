"""Lake columns for source columns: which owns which name, and under which type."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.lake_columns import allocate, column_name, folded
from ingestd.model.lake_state import RegisteredColumn
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column, lake_type_name

INT, LONG, TEXT = pa.int32(), pa.int64(), pa.string()
TYPES = [
    pa.int16(),
    INT,
    LONG,
    TEXT,
    pa.decimal128(10, 2),
    pa.decimal128(12, 4),
    TIMESTAMP,
    TIMESTAMP_NTZ,
]

Known = dict[str, RegisteredColumn]


def column(name: str, type_: pa.DataType = TEXT) -> Column:
    return Column(name, 25, -1, type_)


def registered(known: Known, columns: tuple[Column, ...]) -> Known:
    """What `_tables` has of the table's columns after these were recorded."""
    new = {
        c.lake_name: RegisteredColumn(
            c.lake_name, c.name, c.type_oid, c.typmod, lake_type_name(c.type)
        )
        for c in columns
    }
    return {**known, **new}


def after(*schemas: list[Column]) -> tuple[list[list[str]], Known]:
    """The lake's names of each schema in turn, and what the lake then has."""
    known: Known = {}
    names = []
    for schema in schemas:
        given_ = allocate(schema, known)
        assert [c.name for c in given_] == [c.name for c in schema]
        names.append([c.lake_name for c in given_])
        known = registered(known, given_)
    return names, known


def test_names_are_kept() -> None:
    columns = [column("id", INT), column("Ünï c"), column('a"b.c'), column("select")]
    assert allocate(columns, {}) == tuple(columns)


def test_a_changed_type_uses_another_column_and_back_the_old_one() -> None:
    names, _ = after(
        [column("a", INT)], [column("a", TEXT)], [column("a", INT)], [column("a", TIMESTAMP)]
    )
    assert names == [["a"], ["a__v2"], ["a"], ["a__v3"]]


def test_a_wider_integer_column_is_kept() -> None:
    _, known = after([column("a", LONG)])
    (narrow,) = allocate([column("a", INT)], known)
    assert (narrow.lake_name, narrow.type) == ("a", LONG)
    (wide,) = allocate([column("a", LONG)], after([column("a", INT)])[1])
    assert (wide.lake_name, wide.type) == ("a__v2", LONG)


def test_integers_widened_and_narrowed_again_keep_their_column() -> None:
    names, _ = after([column("a", INT)], [column("a", LONG)], [column("a", INT)])
    assert names == [["a"], ["a__v2"], ["a"]]


def test_a_scale_is_never_changed() -> None:
    names, _ = after([column("n", pa.decimal128(10, 2))], [column("n", pa.decimal128(12, 4))])
    assert names == [["n"], ["n__v2"]]


def test_names_that_differ_by_case_go_by_the_order_of_the_source() -> None:
    names, _ = after(
        [
            column("id"),
            column("ID"),
            column("Id", INT),
            column("straße"),
            column("STRASSE"),
            column("\u0131"),
            column("i"),
        ]
    )
    assert names == [["id", "ID__v2", "Id__v3", "straße", "STRASSE__v2", "\u0131", "i__v2"]]


def test_a_newcomer_does_not_take_the_name_of_its_owner() -> None:
    names, _ = after([column("Id")], [column("id"), column("Id")], [column("id")])
    assert names == [["Id"], ["id__v2", "Id"], ["id__v2"]]


def test_what_was_dropped_keeps_its_name() -> None:
    names, _ = after([column("Id"), column("x")], [column("x")], [column("ID"), column("x")])
    assert names[-1] == ["ID__v2", "x"]


def test_a_source_column_may_be_called_like_a_version() -> None:
    names, _ = after(
        [column("x", INT), column("x__v2")],
        [column("x", TEXT), column("x__v2")],
        [column("x", TEXT), column("x__v2", INT)],
    )
    assert names == [["x", "x__v2"], ["x__v3", "x__v2"], ["x__v3", "x__v2__v2"]]
    names, _ = after([column("x", INT)], [column("x", TEXT)], [column("x__v2"), column("x")])
    assert names[-1] == ["x__v2__v2", "x__v2"]


def test_a_reserved_name_is_given_to_no_column() -> None:
    names, _ = after([column("_CDC_op"), column("_cdc_x"), column("_cdc")])
    assert names == [["_x005F_CDC_op", "_x005F_cdc_x", "_cdc"]]


def test_a_column_with_the_mapped_name_of_another_keeps_its_own() -> None:
    names, _ = after([column("_CDC_op"), column("_x005F_cdc_OP")])
    assert names == [["_x005F_CDC_op__v2", "_x005F_cdc_OP"]]


@pytest.mark.parametrize("name", ["is_xml", "_x0020_", "a b", "a`b", "%", "..", "1", "é" * 31])
def test_names_that_every_reader_takes_are_not_mapped(name: str) -> None:
    assert column_name(name) == name


def test_folding_is_as_coarse_as_any_comparison_without_case() -> None:
    every = (chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000)
    for char in every:
        for other in {char.lower(), char.upper(), char.casefold(), char.title()} - {char}:
            assert folded(other) == folded(char), (char, other)


letters = st.text(st.sampled_from("aAiI\u0130\u0131ß\u017fs\u212a_"), min_size=1, max_size=3)
versions = st.sampled_from(["", "", "", "__v2", "__v3", "__V2"])
names_ = st.builds("{}{}".format, letters | st.sampled_from(["_cdc_a", "_CDC_A"]), versions)
schemas_ = st.lists(
    st.lists(st.builds(column, names_, st.sampled_from(TYPES)), unique_by=lambda c: c.name),
    min_size=1,
    max_size=6,
)


@given(schemas_)
def test_i7_no_value_comes_under_another_columns_name_or_type(schemas: list[list[Column]]) -> None:
    known: Known = {}
    for schema in schemas:
        chosen = allocate(schema, known)
        assert [c.name for c in chosen] == [c.name for c in schema]
        for wanted, got in zip(schema, chosen, strict=True):
            if wanted.type != got.type:
                assert pa.types.is_integer(wanted.type)
                assert got.type.bit_width > wanted.type.bit_width
            before = known.get(got.lake_name)
            if before is not None:
                assert before.source_name == got.name
                assert before.lake_type == lake_type_name(got.type)
        known = registered(known, chosen)
        assert allocate(schema, known) == chosen
        assert allocate(schema, dict(reversed(known.items()))) == chosen
        assert not any(folded(name).startswith("_cdc_") for name in known)
        assert len({folded(name) for name in known}) == len(known)
