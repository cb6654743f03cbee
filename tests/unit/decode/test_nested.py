"""Arrays and composite values: what the server writes is decoded, all else is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import texts_of
from ingestd.model.schema import TIMESTAMP
from tests.harness.examples import examples
from tests.unit.decode.plain import write_array, write_record
from tests.unit.decode.test_cast import check

Texts = list[bytes | None]


def list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


PAIR = pa.struct([pa.field("a", pa.string()), pa.field("B ü", pa.int32())])
ONE = pa.struct([pa.field("only", pa.string())])
NEST = pa.struct([pa.field("list", list_of(pa.int64())), pa.field("pair", PAIR)])
KINDS = [
    list_of(pa.int32()),
    list_of(pa.string()),
    list_of(pa.binary()),
    list_of(TIMESTAMP),
    list_of(pa.decimal128(5, 2)),
    list_of(pa.bool_()),
    PAIR,
    ONE,
    NEST,
    list_of(PAIR),
    list_of(list_of(pa.string())),
]
ODD = [
    *(b"", b"{", b"}", b"{}", b"}{", b"{}}", b"{{}", b"{ }", b"{,}", b"{1,}", b"{,1}", b"{1 }"),
    *(b"{1,2}", b"{1,NULL,3}", b"{null}", b"{Null}", b'{"NULL"}', b'{"null"}', b'{"NULLS"}'),
    *(b"{{1,2},{3,4}}", b"{{}}", b"[0:1]={1,2}", b"[2:2]={1}", b"{1}{2}", b"{1},{2}", b"{007}"),
    *(b'{""}', b'{"a"}', b'{"a b"}', b"{a b}", b'{"a,b",c}', b'{"}"}', b'{"a\\"b"}', b'{"\\\\"}'),
    *(b'{"a\\b"}', b"{a\\\\b}", b'{"a""b"}', b'{"a"b}', b'{a"b"}', b'{"a', b'{"a\\"}', b'{"a\\'),
    *(b'{"a b"c"d e"}', b'{"a b"",c"}', b'{"\\\\\\\\\\""}', b'{"\\\\\\"}', b'{a,"b c",NULL,""}'),
    *(b'{"\n"}', b"{\t}", b"{\xff}", b'{"\xff "}', b"{()}", b'{"(a,1)"}', b'{"(\\"a b\\",)",NULL}'),
    *(b"()", b"(,)", b"(,,)", b"(a,1)", b"(a,)", b"(,1)", b"(a, 1)", b'("",)', b'("a",1)', b"("),
    *(b'("a b",2)', b'("a""b",)', b'("a\\\\b",)', b'("a\\b",)', b'("a\\"b",)', b"(a,x)", b"((),1)"),
    *(b'("""",)', b'("a,b",7)', b'("a"b"c d",)', b'("(",)', b'("a b","1")', b"(a,1)x", b"x(a,1)"),
    *(b'("{1,NULL}","(""a b"",3)")', b'({1},"(,)")', b'(,"(x,)")', b'({},"(,)")', b"({},)", b")("),
    *(b'("{}","(,)")', b"(null,)", b"(NULL,1)", b"({a},)", b"{(,)}", b'{"(,)"}', b'{"(,x)"}'),
    *(b'{"{a}"}', b'{"{a,\\"b c\\"}"}', b"{t,f}", b"{1.50,2.00}", b"{1.5}", b'{"\\\\x00ff"}'),
    *(b'{"2024-01-01 00:00:00+00"}', b"{2024-01-01}", b'{"2024-01-01 00:00:00+00",infinity}'),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_lossless_odd_values_are_refused_one_by_one(kind: pa.DataType) -> None:
    for value in ODD:
        check([value], kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_lossless_odd_values_among_good_ones_and_nulls(kind: pa.DataType) -> None:
    check([None, *ODD, None, *ODD[::-1]], kind)


@pytest.mark.thorough
@examples(1000)
@given(
    st.sampled_from(KINDS),
    st.lists(
        st.none()
        | st.sampled_from(ODD)
        | st.text('{}(),"\\ aNUL1\n', max_size=14).map(str.encode)
        | st.text('(),"\\ a1', max_size=12).map(lambda s: f"({s})".encode())
        | st.text('{},"\\ aNUL1', max_size=12).map(lambda s: f"{{{s}}}".encode())
        | st.binary(max_size=12),
        max_size=8,
    ),
)
@example(KINDS[1], [b'{"}', b'{"a"}'])
@example(PAIR, [b'(")', b'("a",)', b'("a""', b'("b",)'])
@example(KINDS[1], [b'{"a', b'b"}', b'{"c d"}', None])
def test_lossless_any_bytes(kind: pa.DataType, values: Texts) -> None:
    check(values, kind)


ELEMENTS = st.none() | st.text('ab"\\{}(),. \tnulNUL\xe4', max_size=6).map(str.encode)


@examples(300)
@given(st.lists(st.none() | st.lists(ELEMENTS, max_size=5), max_size=8))
def test_lossless_every_array_of_text_the_server_writes_is_taken(
    arrays: list[list[bytes | None] | None],
) -> None:
    texts = [None if a is None else write_array(a) for a in arrays]
    array, refused = cast(texts_of(pa.array(texts, pa.binary())), list_of(pa.string()))
    array.validate(full=True)
    assert refused.tolist() == []
    assert array.to_pylist() == [
        None if a is None else [None if e is None else e.decode() for e in a] for a in arrays
    ]


@examples(300)
@given(st.lists(st.none() | st.lists(ELEMENTS, min_size=3, max_size=3), max_size=8))
def test_lossless_every_composite_value_of_the_server_is_cast(
    records: list[list[bytes | None] | None],
) -> None:
    kind = pa.struct([pa.field(n, pa.string()) for n in "xyz"])
    texts = [None if r is None else write_record(r) for r in records]
    array, refused = cast(texts_of(pa.array(texts, pa.binary())), kind)
    array.validate(full=True)
    assert refused.tolist() == []
    want: list[Any] = [
        None
        if r is None
        else {n: None if f is None else f.decode() for n, f in zip("xyz", r, strict=True)}
        for r in records
    ]
    assert array.to_pylist() == want


def test_values_of_many_pieces_come_out_in_order() -> None:
    numbers = [list(range(i % 7)) for i in range(60_000)]
    texts: Texts = [write_array([str(n).encode() for n in a]) for a in numbers]
    texts[1000] = b"{1,x}"
    texts[50_000] = None
    texts[2] = write_array([str(n).encode() for n in range(100_000)])
    array, refused = cast(texts_of(pa.array(texts, pa.binary())), list_of(pa.int32()))
    array.validate(full=True)
    assert refused.tolist() == [1000]
    found = array.to_pylist()
    assert found[2] == list(range(100_000))
    assert found[1000] is found[50_000] is None
    assert [len(a) for i, a in enumerate(found) if i not in {2, 1000, 50_000}] == [
        i % 7 for i in range(60_000) if i not in {2, 1000, 50_000}
    ]
