"""The compiled part: invalid arguments, and that it accepts what `cast` accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from ingestd.decode import native
from ingestd.decode.change_batch import Tuples, cast_column
from ingestd.decode.native import NativeFunctions
from ingestd.decode.pgoutput.tuples import TupleRange, walk_typed
from ingestd.decode.values.text_column import ByteBuffer, texts_of
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column
from tests.unit.decode.pgoutput import UNCHANGED, Value, tuple_data

pytestmark = pytest.mark.parametrize("decoding", ["compiled"], indirect=True, scope="module")
TYPES = (pa.int32(), pa.string(), pa.bool_())
ROW = (b"-12", b"text", b"t")


@pytest.fixture
def compiled() -> NativeFunctions:
    assert native.compiled is not None
    return native.compiled


def column(name: str, kind: pa.DataType) -> Column:
    return Column(name, 0, -1, kind)


def columns(kinds: Sequence[pa.DataType] = TYPES) -> list[Column | None]:
    return [column(f"c{n}", kind) for n, kind in enumerate(kinds)]


def laid_out(
    tuples: Sequence[bytes], *, before: bytes = b"", behind: bytes = b""
) -> tuple[ByteBuffer, TupleRange]:
    lengths = np.array([len(t) for t in tuples])
    ends = len(before) + np.cumsum(lengths)
    source = ByteBuffer(before + b"".join(tuples) + behind)
    return source, TupleRange(ends - lengths, ends, len(TYPES))


def walked(rows: Sequence[Sequence[Value]], wanted: Sequence[Column | None]) -> Tuples | None:
    source, part = laid_out([tuple_data(row) for row in rows], before=b"before")
    found = walk_typed(source, part, wanted)
    return None if found is None else found[0]


def test_columns_that_are_wanted_are_typed_or_texts() -> None:
    first, _, third = columns()
    found = walked([ROW, (None, None, None)], [first, column("c1", pa.string()), third])
    assert found is not None
    assert found.values["c0"].array.to_pylist() == [-12, None]
    assert found.values["c2"].array.to_pylist() == [True, None]
    assert found.fields["c1"].texts.gather().to_pylist() == [b"text", None]
    found = walked([ROW], [None, None, third])
    assert found is not None
    assert list(found.values) == ["c2"]
    assert not found.fields


def test_refused_values_are_reported_with_their_texts() -> None:
    rows = [ROW, (b"0012", b"", b"x"), (None, b"", b"f"), (b"2147483648", b"", b"yes")]
    found = walked(rows, columns())
    assert found is not None
    for name, refused, texts in (
        ("c0", [1, 3], [b"0012", b"2147483648"]),
        ("c2", [1, 3], [b"x", b"yes"]),
    ):
        assert found.values[name].refused.tolist() == refused
        assert found.values[name].texts.gather().to_pylist() == texts
    assert found.values["c0"].array.to_pylist() == [-12, None, None, None]
    assert found.values["c2"].array.to_pylist() == [True, None, False, None]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((pa.int64(), text) for text in (b"7", b"-1234567", b"12345678", b"1234567890123456789")),
        (pa.decimal128(18, 2), b"-1234567890123456.78"),
        (pa.decimal128(12, 12), b"0.123456789012"),
        (pa.decimal128(9, 0), b"123456789"),
        (pa.date32(), b"2024-02-29"),
        (TIMESTAMP_NTZ, b"1999-10-28 19:38:47.654321"),
        (TIMESTAMP, b"0301-11-03 23:59:59.9+00"),
    ],
    ids=str,
)
def test_any_byte_in_a_value_is_judged_as_cast_judges_it(kind: pa.DataType, text: bytes) -> None:
    changed = [
        text[:at] + bytes([byte]) + text[at + 1 :] for at in range(len(text)) for byte in range(256)
    ]
    texts = [text, *changed, *(text[:n] for n in range(len(text))), text + b"0"]
    values = pa.array(texts, pa.binary())
    wanted = cast_column(texts_of(values), column("c0", kind))
    source, part = laid_out([tuple_data([t]) for t in texts])
    found = walk_typed(source, TupleRange(part.at, part.ends, 1), [column("c0", kind)])
    assert found is not None
    assert found[0].values["c0"].array.equals(wanted.array)
    assert found[0].values["c0"].refused.tolist() == wanted.refused.tolist()
    assert wanted.array[0].is_valid


def test_a_column_of_which_a_value_was_not_sent_is_texts() -> None:
    found = walked([(UNCHANGED, UNCHANGED, b"t"), (b"7", b"x", b"f")], columns())
    assert found is not None
    assert list(found.values) == ["c2"]
    for name, texts in (("c0", [None, b"7"]), ("c1", [None, b"x"])):
        field = found.fields[name]
        assert field.unchanged is not None
        assert field.unchanged.tolist() == [True, False]
        assert field.texts.gather().to_pylist() == texts
    assert cast_column(found.fields["c0"].texts, column("c0", pa.int32())).refused.tolist() == []


def test_where_a_tuple_is_malformed_nothing_is_taken() -> None:
    whole = tuple_data(ROW)
    source, part = laid_out([whole, whole], behind=whole)
    assert walk_typed(source, part, columns()) is not None
    for length in range(len(whole)):
        for order in ([whole[:length], whole], [whole, whole[:length]]):
            source, part = laid_out(order, behind=whole)
            assert walk_typed(source, part, columns()) is None
    for wrong in (
        tuple_data(ROW[:2]),
        whole.replace(b"t\0\0\0\3", b"b\0\0\0\3"),
        whole.replace(b"\0\0\0\3", b"\xff\xff\xff\xff"),
        whole.replace(b"\0\0\0\4", b"\x7f\xff\xff\xff"),
    ):
        source, part = laid_out([whole, wrong])
        assert walk_typed(source, part, columns()) is None


@pytest.mark.parametrize(
    ("at", "end"), [(-1, 20), (0, 1 << 62), (1 << 62, 1 << 62), (20, 0), (-9, -5)]
)
def test_nothing_outside_the_buffer_is_read(at: int, end: int) -> None:
    source = ByteBuffer(tuple_data(ROW))
    assert walk_typed(source, TupleRange(np.array([at]), np.array([end]), 3), columns()) is None


def test_a_tuple_may_end_before_its_message() -> None:
    source, part = laid_out([tuple_data(ROW) + b"more"])
    found = walk_typed(source, part, columns())
    assert found is not None
    assert found[1].tolist() == [len(tuple_data(ROW))]


def test_arrays_that_are_too_short_are_refused(compiled: NativeFunctions) -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    states = np.zeros(2, np.uint8)
    for ends, stops, values, given in (
        (one, two, two, states),
        (two, one, two, states),
        (two, two, one, states),
        (two, two, two, states[:1]),
    ):
        with pytest.raises(ValueError, match="arrays"):
            compiled.walk(b"", two, ends, stops, [(1, 8, 0, 0, values, None, given)])
    with pytest.raises(ValueError, match="arrays"):
        compiled.walk(b"", two, two, two, [(0, 8, 0, 0, two, one, states)])
    with pytest.raises(ValueError, match="too short"):
        compiled.words(b"", two, one)


def test_words_outside_their_buffer_are_zeros(compiled: NativeFunctions) -> None:
    offsets = np.array([-1, -(1 << 62), 0, 1, 8, 9, 1 << 62])
    words = np.full(len(offsets), 7)
    compiled.words(b"123456789", offsets, words)
    assert [int(w).to_bytes(8, "big").rstrip(b"\0") for w in words] == [
        *(b"", b"", b"12345678", b"23456789", b"9", b"", b"")
    ]
    compiled.words(b"", offsets, words)
    assert not words.any()


@pytest.mark.parametrize(
    ("kind", "size", "precision", "scale"),
    [
        *((-1, 8, 0, 0), (7, 8, 0, 0), (0, 4, 0, 0), (1, 3, 0, 0), (1, 16, 0, 0)),
        *((6, 16, 19, 2), (6, 16, 2, 3), (6, 16, 0, 0), (6, 16, 2, -1)),
    ],
)
def test_columns_that_there_are_not_are_refused(
    compiled: NativeFunctions, kind: int, size: int, precision: int, scale: int
) -> None:
    empty, states = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    output = (kind, size, precision, scale, empty, empty, states)
    with pytest.raises(ValueError, match="no such column"):
        compiled.walk(b"", empty, empty, empty, [output])
    with pytest.raises(ValueError, match="too many"):
        compiled.walk(b"", empty, empty, empty, [None] * (1 << 15))


def test_what_is_read_only_is_not_written(compiled: NativeFunctions) -> None:
    one, fixed = np.zeros(1, np.int64), np.zeros(1, np.int64)
    fixed.flags.writeable = False
    with pytest.raises((BufferError, TypeError, ValueError)):
        compiled.walk(b"", one, one, fixed, [])
    with pytest.raises((BufferError, TypeError, ValueError)):
        compiled.walk(b"", one, one, one, [(1, 8, 0, 0, fixed, None, np.zeros(1, np.uint8))])


@pytest.mark.parametrize(
    ("start", "length", "room"),
    [(0, 4, 3), (0, 11, 20), (10, 1, 20), (-1, 1, 20), (1 << 62, 1 << 62, 20), (0, -1, 20)],
)
def test_values_outside_their_buffer_are_not_copied(
    compiled: NativeFunctions, start: int, length: int, room: int
) -> None:
    offsets, to = np.zeros(2, np.int32), pa.allocate_buffer(room)
    with pytest.raises(ValueError, match="outside"):
        compiled.gather(b"0123456789", np.array([start]), np.array([length]), offsets, to)
    with pytest.raises(ValueError, match="outside"):
        compiled.gather(b"0123456789", np.zeros(2, int), np.ones(2, int), offsets, to)


@pytest.mark.parametrize(
    ("start", "length", "room"),
    [(0, 8, 2), (0, 12, 20), (10, 2, 20), (-1, 4, 20), (1 << 62, 1 << 62, 20), (0, -4, 20)],
)
def test_texts_of_bytes_outside_their_buffer_are_not_read(
    compiled: NativeFunctions, start: int, length: int, room: int
) -> None:
    offsets, odd, to = np.zeros(2, np.int32), np.zeros(1, np.bool_), pa.allocate_buffer(room)
    text = b"\\x01234567"
    with pytest.raises(ValueError, match="outside"):
        compiled.unhex(text, np.array([start]), np.array([length]), offsets, odd, to)
    with pytest.raises(ValueError, match="outside"):
        compiled.unhex(text, np.zeros(2, int), np.full(2, 4), np.zeros(3, np.int32), odd, to)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 40])
def test_values_of_any_length_are_copied_whole(compiled: NativeFunctions, size: int) -> None:
    buffer = bytes(range(100))
    starts, lengths = np.array([0, 60, 100 - size, 5]), np.array([size, 0, size, size])
    offsets, to = np.zeros(5, np.int32), pa.allocate_buffer(3 * size)
    compiled.gather(buffer, starts, lengths, offsets, to)
    wanted = b"".join(buffer[s : s + n] for s, n in zip(starts, lengths, strict=True))
    assert to.to_pybytes() == wanted
    assert offsets.tolist() == [0, size, size, 2 * size, 3 * size]


def test_odd_and_unsent_values_are_kept_apart_by_column() -> None:
    rows = [
        (b"x", UNCHANGED, b"1", None),
        (b"1", b"2", b"3", b"4"),
        (None, b"y", b"007", b"t"),
        (b"z", b"5", b"-1", UNCHANGED),
    ]
    wanted = columns([pa.int16()] * 4)
    source, part = laid_out([tuple_data(row) for row in rows])
    found = walk_typed(source, TupleRange(part.at, part.ends, 4), wanted)
    assert found is not None
    assert {
        name: (cast.refused.tolist(), cast.texts.gather().to_pylist(), cast.array.to_pylist())
        for name, cast in found[0].values.items()
    } == {
        "c0": ([0, 3], [b"x", b"z"], [None, 1, None, None]),
        "c2": ([2], [b"007"], [1, 3, None, -1]),
    }
    texts = {name: field.texts.gather().to_pylist() for name, field in found[0].fields.items()}
    assert texts == {"c1": [None, b"2", b"y", b"5"], "c3": [None, b"4", b"t", None]}


def test_as_many_columns_as_a_relation_can_have() -> None:
    width = (1 << 15) - 1
    tuple_ = tuple_data([b"1"] * width)
    part = TupleRange(np.array([0]), np.array([len(tuple_)]), width)
    found = walk_typed(ByteBuffer(tuple_), part, columns([pa.int32()] * width))
    assert found is not None
    assert len(found[0].values) == width


def test_what_was_compiled_from_another_checkout_is_not_used(compiled: NativeFunctions) -> None:
    assert native.load() is compiled
    assert native.load(compiled.VERSION + 1) is None
