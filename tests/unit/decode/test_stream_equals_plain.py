"""The vectorised decoder against the plain one, on generated streams cut anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.decoder import GROUPS, GroupPolicy, PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.model.changes import ChangeSet, change_schema
from ingestd.model.errors import ProtocolError
from ingestd.model.schema import Table, with_before
from tests.harness.examples import examples
from tests.unit.decode import pgoutput
from tests.unit.decode.plain import Plain, write_array

NUMERIC_12_2 = (12 << 16 | 2) + 4
NUMERIC_30_5 = (30 << 16 | 5) + 4
ODD = st.sampled_from(
    [
        b"",
        b"0",
        b"-0",
        b"007",
        b"0x1F",
        b"t",
        b"x",
        b"NaN",
        b"infinity",
        b"Infinity",
        b"-Infinity",
        b"99999999999999999999",
        b"1e5",
        b"1.2.3",
        b"-0.00",
        b".50",
        b"12345678901.00",
        b"0000-01-01",
        b"0044-03-15 BC",
        b"2024-02-30",
        b"10000-01-01",
        b"2024-01-01T00:00:00",
        b"2024-01-01 24:00:00",
        b"2024-01-01 00:00:00.10",
        b"2024-01-01 00:00:00.",
        b"10000-01-01 00:00:00+00",
        b"2024-01-01 00:00:00+02",
        b"0000-01-01 00:00:00+00",
        b"\\x0",
        b"\\xZZ",
        b"\\xAB",
        b"\xff\xfe",
        b"\xc3\x28",
        b"{{1},{2}}",
        b"[0:1]={1,2}",
        b'{1,"2"}',
    ]
)


def _number(digits: int, scale: int) -> st.SearchStrategy[bytes]:
    top = 10**digits - 1
    return st.integers(-top, top).map(lambda n: _scaled(n, scale))


def _scaled(number: int, scale: int) -> bytes:
    text = str(abs(number)).rjust(scale + 1, "0")
    sign = "-" if number < 0 else ""
    return f"{sign}{text[:-scale]}.{text[-scale:]}".encode()


def _float_text(number: float) -> bytes:
    if math.isinf(number):
        return b"Infinity" if number > 0 else b"-Infinity"
    return b"NaN" if math.isnan(number) else repr(number).removesuffix(".0").encode()


def _fraction(text: str) -> bytes:
    return (text.rstrip("0").rstrip(".") if "." in text else text).encode()


_stamps = st.datetimes().map(lambda d: _fraction(d.isoformat(" ")))
VALUES: dict[tuple[int, int], st.SearchStrategy[bytes]] = {
    (16, -1): st.sampled_from([b"t", b"f"]),
    (20, -1): st.integers(-(2**63), 2**63 - 1).map(lambda n: str(n).encode()),
    (21, -1): st.integers(-(2**15), 2**15 - 1).map(lambda n: str(n).encode()),
    (23, -1): st.integers(-(2**31), 2**31 - 1).map(lambda n: str(n).encode()),
    (701, -1): st.floats().map(_float_text),
    (25, -1): st.text(max_size=6).map(str.encode),
    (2950, -1): st.uuids().map(lambda u: str(u).encode()),
    (17, -1): st.binary(max_size=5).map(lambda b: b"\\x" + b.hex().encode()),
    (1082, -1): st.dates().map(lambda d: d.isoformat().encode()),
    (1114, -1): _stamps,
    (1184, -1): _stamps.map(lambda t: t + b"+00"),
    (1700, NUMERIC_12_2): _number(12, 2),
    (1700, NUMERIC_30_5): _number(30, 5),
    (1700, -1): _number(40, 3),
    (1007, -1): st.lists(st.none() | st.integers(-9, 2**31).map(lambda n: str(n).encode())).map(
        write_array
    ),
    (1009, -1): st.lists(st.none() | st.text('a, "\\{}é', max_size=3).map(str.encode)).map(
        write_array
    ),
}
NAMES = st.sampled_from(["id", "ünï cölumn", "数据", "a", "b", "naïve", "x y"])


@dataclass(frozen=True)
class Shape:
    """A relation as the generator draws it."""

    oid: int
    identity: str
    columns: tuple[tuple[str, int, int, bool], ...]

    def message(self) -> bytes:
        return pgoutput.relation(
            self.oid, f"täble {self.oid}", self.columns, identity=self.identity
        )


@st.composite
def shapes(draw: st.DrawFn, oid: int) -> Shape:
    identity = draw(st.sampled_from("dfn"))
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    types = [draw(st.sampled_from(sorted(VALUES))) for _ in names]
    keys = [identity == "f" or (identity == "d" and draw(st.booleans())) for _ in names]
    return Shape(
        oid, identity, tuple((n, *t, k) for n, t, k in zip(names, types, keys, strict=True))
    )


@st.composite
def tuples(draw: st.DrawFn, shape: Shape, *, unchanged: bool = True) -> list[Any]:
    choices: list[st.SearchStrategy[Any]] = [st.none(), ODD]
    if unchanged:
        choices.append(st.just(pgoutput.UNCHANGED))
    found = []
    for _, type_oid, typmod, _ in shape.columns:
        good = VALUES[type_oid, typmod]
        rare = draw(st.integers(0, 3)) == 0
        found.append(draw(st.one_of(choices) if rare else good))
    return found


@st.composite
def changes(draw: st.DrawFn, known: dict[int, Shape]) -> bytes:
    oid = draw(st.sampled_from(sorted(known)))
    shape, kind = known[oid], draw(st.sampled_from("IIUUUDDT"))
    tag: Literal["K", "O"] = draw(st.sampled_from(["K", "O"]))
    if kind == "I":
        return pgoutput.insert(oid, draw(tuples(shape)))
    if kind == "U":
        old = draw(st.none() | tuples(shape, unchanged=False))
        return pgoutput.update(oid, draw(tuples(shape)), old, tag)
    if kind == "D":
        return pgoutput.delete(oid, draw(tuples(shape, unchanged=False)), tag)
    return pgoutput.truncate(*draw(st.lists(st.sampled_from(sorted(known)), max_size=4)))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    known = {oid: draw(shapes(oid)) for oid in range(1, draw(st.integers(1, 3)) + 1)}
    messages, lsn, told = [], 100, False
    for _ in range(draw(st.integers(1, 5))):
        ts, xid = draw(st.integers(-(2**50), 2**50)), draw(st.integers(0, 2**32 - 1))
        messages.append(pgoutput.begin(lsn, ts=ts, xid=xid))
        if draw(st.booleans()):
            messages.append(b"O" + bytes(8) + b"origin\0")
        for _ in range(draw(st.integers(0, 6))):
            if not told:
                messages += [s.message() for s in known.values()]
                told = True
            if draw(st.integers(0, 5)) == 0:
                oid = draw(st.sampled_from(sorted(known)))
                known[oid] = draw(st.just(known[oid]) | shapes(oid))
                messages.append(known[oid].message())
            messages.append(draw(changes(known)))
        messages.append(pgoutput.commit(lsn, lsn + 8, ts=ts))
        lsn += draw(st.integers(8, 90))
    return messages


def resolve(relation: Relation) -> Table | None:
    """Relation 3 is not captured; relation 2 has complete old rows."""
    if relation.oid == 3:
        return None
    return with_before(table_of(relation), full=relation.oid == 2)


def decode(
    messages: list[bytes], cuts: list[int], hold_bytes: int, groups: GroupPolicy = GROUPS
) -> list[ChangeSet]:
    decoder = PgoutputDecoder(resolve, hold_bytes=hold_bytes, groups=groups)
    change_sets: list[ChangeSet] = []
    bounds = [0, *sorted(c % (len(messages) + 1) for c in cuts), len(messages)]
    for start, end in pairwise(bounds):
        change_sets += decoder.feed(*pgoutput.laid_out(messages[start:end]))
    return change_sets


def rows_of(change_sets: list[ChangeSet]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for change_set in change_sets:
        for batch in change_set.batches:
            batch.rows.validate(full=True)
            assert batch.rows.schema == change_schema(batch.table)
            rows = batch.rows.to_pylist(maps_as_pydicts="strict")
            times = batch.rows.column("_cdc_ts").cast("int64").to_pylist()
            for row, ts in zip(rows, times, strict=True):
                row["_cdc_ts"] = ts
            found.setdefault(batch.table.id, []).extend(rows)
    return found


CUTS = st.lists(st.integers(0, 60), max_size=6)


STREAMS_DECODED = given(
    streams(),
    CUTS,
    st.sampled_from([0, 60, 300, 1 << 20]),
    st.sampled_from([1, GROUPS.sparse, 1 << 20]),  # a table's messages are copied together or not
    # tables are decoded by themselves, or with others, of which there may be many
    st.sampled_from(
        [
            (0, 1),
            (2, 10),
            (GROUPS.small_rows, 1),
            (GROUPS.small_rows, 10),
            (GROUPS.small_rows, GROUPS.values),
        ]
    ),
)


@pytest.mark.slow
@examples(100)
@STREAMS_DECODED
def test_decoder_equals_plain_one(
    messages: list[bytes], cuts: list[int], hold: int, sparse: int, together: tuple[int, int]
) -> None:
    assert_equals_plain_one(messages, cuts, hold, sparse, together)


@pytest.mark.thorough
@examples(1000)
@STREAMS_DECODED
def test_decoder_equals_plain_one_in_many_streams(
    messages: list[bytes], cuts: list[int], hold: int, sparse: int, together: tuple[int, int]
) -> None:
    assert_equals_plain_one(messages, cuts, hold, sparse, together)


def assert_equals_plain_one(
    messages: list[bytes], cuts: list[int], hold: int, sparse: int, together: tuple[int, int]
) -> None:
    plain = Plain(resolve)
    for message in messages:
        plain.feed(message)
    groups = GroupPolicy(small_rows=together[0], values=together[1], sparse=sparse)
    change_sets = decode(messages, cuts, hold, groups)
    found = sorted(rows_of(change_sets).items())
    assert repr(found) == repr(sorted(plain.rows.items()))  # in repr NaN is NaN, -0.0 not 0.0
    assert np.concatenate([c.commit_times for c in change_sets]).tolist() == plain.commit_times
    assert change_sets[-1].position == plain.position


@pytest.mark.thorough
@examples(100)
@given(streams(), CUTS, st.sampled_from([0, 60, 300]))
def test_whole_transactions_end_change_sets_unless_open(
    messages: list[bytes], cuts: list[int], hold: int
) -> None:
    position, pending = 0, None
    for change_set in decode(messages, cuts, hold):
        assert change_set.position >= position
        position = change_set.position
        lsns = [n for b in change_set.batches for n in b.rows.column("_cdc_lsn").to_pylist()]
        if lsns or pending is not None:
            assert change_set.first_lsn == min([*lsns, pending or math.inf])
        assert change_set.nbytes == sum(b.nbytes for b in change_set.batches)
        assert (
            change_set.transactions
            == len({*lsns, *([pending] if pending else [])}) - change_set.ends_in_transaction
        )
        if change_set.ends_in_transaction:
            assert lsns
            assert max(lsns) >= position
            pending = max(lsns)
        else:
            assert all(lsn < position for lsn in lsns)
            pending = None


@pytest.mark.thorough
@examples(300)
@given(
    streams(),
    CUTS,
    st.data(),
    st.sampled_from([1, GROUPS.sparse]),
    st.sampled_from([0, GROUPS.small_rows]),
)
def test_damaged_bytes_give_protocol_error_and_nothing_else(
    messages: list[bytes], cuts: list[int], data: st.DataObject, sparse: int, small: int
) -> None:
    damaged = list(messages)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        message = bytearray(damaged[at])
        how = data.draw(st.sampled_from(["byte", "cut", "drop", "twice", "grow"]))
        if how == "byte":
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del message[data.draw(st.integers(1, len(message))) :]
        elif how == "grow":
            message += data.draw(st.binary(min_size=1, max_size=9))
        put = {"drop": 0, "twice": 2}.get(how, 1)
        damaged[at : at + 1] = [bytes(message)] * put
        damaged = damaged or messages
    _decodes_or_refuses(damaged, cuts, GroupPolicy(small_rows=small, sparse=sparse))


@examples(300)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8), CUTS)
def test_garbage_gives_protocol_error_and_nothing_else(
    messages: list[bytes], cuts: list[int]
) -> None:
    _decodes_or_refuses(messages, cuts)


def _decodes_or_refuses(
    messages: list[bytes], cuts: list[int], groups: GroupPolicy = GROUPS
) -> None:
    try:
        rows_of_change_sets = decode(messages, cuts, 60, groups)
    except ProtocolError:
        return
    for change_set in rows_of_change_sets:
        for batch in change_set.batches:
            batch.rows.validate(full=True)
