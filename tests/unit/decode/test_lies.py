"""Lies about each field of each message that is decoded: a ProtocolError, or harmless (I1, I9)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray

from ingestd.decode.copy.columnar import ColumnarDecoder
from ingestd.decode.copy.message_rows import MessageRows
from ingestd.decode.copy.packing import Packing, fields_of
from ingestd.decode.copy.rows import CopyDecoder, CopyRows
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.decode.pgoutput.reordered_drain import ReorderedDrain
from ingestd.decode.pgoutput.shortening import CopiedChange, StreamedChange
from ingestd.decode.pgoutput.streamed_transactions import MOST_OPEN, StreamedTransactions
from ingestd.decode.type_mapping import lake_type
from ingestd.decode.wire.backend_messages import Cutter, error_fields
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Mask, Table, TableId, with_before
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.rows import FoundRows, PollReadPoint
from ingestd.postgres.wal.block_decoder import BlockDecoder
from tests.harness import lying_messages as honest
from tests.harness.lies import (
    LONG,
    Enclosing,
    Field,
    kind,
    lying_scripts,
    number,
    raw,
    text,
    written,
)
from tests.unit.decode.test_reordered_drain import told
from tests.unit.decode.test_streamed_transactions import MemorySpool

if TYPE_CHECKING:
    from ingestd.model.changes import ChangeSet

pytestmark = pytest.mark.attack("server")
SAID_BYTES = 2000
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FEW = 150
"""So many lies about a script are told in `make test`, chosen at random."""


def _table(*columns: Column) -> Table:
    return Table(TableId("public", "t"), honest.OID, columns, key=("id",), before=("id",))


COPIED = _table(
    *(
        Column(name, oid, typmod, lake_type(oid, typmod), identity=is_key)
        for name, oid, typmod, is_key in honest.COLUMNS
    )
)
PACKED = _table(
    Column("id", 23, -1, lake_type(23, -1)),
    Column("note", 25, -1, lake_type(25, -1)),
    Column("body", 17, -1, lake_type(17, -1)),
    Column("hidden", 25, -1, lake_type(25, -1), mask=Mask("null")),
)
POLLED = PolledTable(COPIED, None, None, 1.0, None)


def resolve(relation: Relation) -> Table | None:
    return with_before(table_of(relation), full=relation.oid == honest.ROOT)


@dataclass(frozen=True)
class Sent:
    """What came from a socket (`Collected`)."""

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ended: psycopg.Error | None

    def block(self) -> Any:
        return self


class Reading:
    """Reads a stream as the daemon does from its socket on, and checks what it is given."""

    def __init__(self, *, limit_bytes: int | None = None, most_open: int = MOST_OPEN) -> None:
        self.change_sets: list[ChangeSet] = []
        self.decoder = PgoutputDecoder(
            resolve, report_message=lambda *_: True, row_limit_bytes=limit_bytes or 1 << 31
        )
        self.order = StreamedTransactions(MemorySpool(), most_open=most_open)
        self.cutter = Cutter()
        if limit_bytes is not None:
            self.cutter = Cutter(limit_bytes, lambda: StreamedChange(limit_bytes // 4))

    def read(self, sent: bytes) -> BaseException | None:
        """Return what ended it: the error of a server, or that of a lie. Raises what is neither."""
        try:
            buffer, found = self.cutter.feed([sent])
            ended = (
                None
                if found.last is None
                else psycopg.Error(str(error_fields(found.last[1]))[:SAID_BYTES])
            )
            given: Any = Sent(buffer, found.starts, found.ends, ended)
            decoding = BlockDecoder(self.decoder, self.order, given)
            while not decoding.is_done:
                self.change_sets += decoding.decode_some()
        except ProtocolError as error:
            return error
        return decoding.ended

    def check(self) -> None:
        """No row is beyond the complete transactions, and the position never decreases."""
        position = 0
        for change_set in self.change_sets:
            assert change_set.position >= position
            position = change_set.position
            for batch in change_set.batches:
                batch.rows.validate(full=True)
                if not change_set.ends_in_transaction:
                    assert max(batch.rows.column("_cdc_lsn").to_pylist()) <= position


def test_bounded_transactions_that_are_never_ended_are_refused() -> None:
    stop = written(honest.xlog_data(kind("E")))
    sent = written(honest.copy_response("W"))
    for xid in range(101):
        start = kind("S"), number("xid", "I", xid), number("is first", "B", 1)
        sent += written(honest.xlog_data(*start)) + stop
    assert "101 open transactions" in str(Reading(most_open=100).read(sent))


def test_bounded_an_origin_is_no_longer_than_a_server_makes_it() -> None:
    script = honest.segments()
    name = next(n for n, (what, _) in enumerate(script) if what == "Origin")
    long = (*honest.origin()[:-1], text("name", "x" * 5000))
    script[name] = "Origin", honest.xlog_data(*long)
    sent = b"".join(written(message) for _, message in script)
    assert "ORIGIN" in str(Reading().read(sent))


# --- COPY ------------------------------------------------------------------------------------


class Decoder(Protocol):
    def feed(self, buffer: bytes, starts: Any, ends: Any) -> object: ...

    def finish(self) -> None: ...


class Unpacking:
    """Has the messages of a drain's COPY unpacked, and decoded."""

    def __init__(self, *, is_ahead: bool) -> None:
        self.messages = MessageRows()
        self.order = ReorderedDrain() if is_ahead else None
        self.decoder = PgoutputDecoder(resolve)

    def feed(self, buffer: bytes, starts: Any, ends: Any) -> None:
        found = self.messages.unpack(buffer, starts, ends)
        if self.order is None:
            self.decoder.feed(buffer, *found)
            return
        for stretch in self.order.feed(buffer, *found):
            self.decoder.feed(*stretch)

    def finish(self) -> None:
        self.messages.finish()
        if self.order is not None:
            self.order.finish()


class Looking:
    """Makes change rows of what a poll of a table returns."""

    def __init__(self) -> None:
        self.rows = CopyRows("public.t", len(honest.COLUMNS) + 3)

    def feed(self, buffer: bytes, starts: Any, ends: Any) -> None:
        rows = self.rows.feed(buffer, starts, ends)
        if rows is not None:
            found = FoundRows.from_copy(POLLED, rows, 1000)
            assert len(found.last_cursor) < 2 * LONG
            for batch in found.changes(PollReadPoint(Lsn(7), AT), None):
                batch.rows.validate(full=True)

    def finish(self) -> None:
        self.rows.finish()


def message_fields(script: honest.Script) -> list[honest.Fields]:
    """The fields of pgoutput's messages alone."""
    return [m[6:] for _, m in script if len(m) > 2 and m[2] == kind("w")]


def int4_array(*numbers: int) -> honest.Fields:
    """An array as the server sends it."""
    heads = zip(
        ("dimensions", "has nulls", "element", "length", "bound"),
        (1, 0, 23, len(numbers), 1),
        strict=True,
    )
    fields = [number(name, "i", value) for name, value in heads]
    for each in numbers:
        fields += [number("element's length", "i", 4), number("element", "i", each)]
    return tuple(fields)


def single() -> honest.Script:
    """A drain's COPY: one message to a row."""
    return _one_to_a_row(message_fields(honest.transaction()))


def ahead() -> honest.Script:
    """A drain's COPY that lists commits first."""
    sent = [written(fields) for fields in message_fields(honest.segments())]
    return _one_to_a_row([(raw("message", message),) for message in told(sent)])


def _one_to_a_row(messages: Sequence[honest.Fields]) -> honest.Script:
    width = number("fields", "h", 1)
    return honest.copied_rows(*((width, Enclosing("length"), *fields) for fields in messages))


def columns(packing: Packing) -> honest.Script:
    """A snapshot's COPY of columns that the server packed."""
    rows: list[honest.Fields] = []
    for first_block in (0, 64):
        fields: list[Field | Enclosing] = [number("fields", "h", fields_of(PACKED, packing))]
        fields += [number("length", "i", 8), number("first block", "q", first_block)]
        fields += [number("length", "i", 4), number("rows", "i", 2)]
        if packing is Packing.MEASURED:
            fields += [number("length", "i", 36), *int4_array(7, 8)]
            for _ in range(2):  # a text, a bytea
                fields += [number("length", "i", 3), raw("texts", b"abc")]
                fields += [number("length", "i", 36), *int4_array(1, 2)]
        else:
            fields += [number("length", "i", 8)]
            fields += [number("number", "i", 7), number("number", "i", 8)]
            fields += [number("length", "i", 4), number("present", "i", 2)]
            fields += [number("length", "i", 4), raw("texts", b"a\x0ebc")]
            fields += [number("length", "i", 4), number("present", "i", 2)]
            fields += [number("length", "i", 3), raw("bytes", b"abc")]
            fields += [number("length", "i", 36), *int4_array(1, 2)]
        for _ in range(2):  # hidden: null
            fields += [number("length", "i", -1)]
        rows.append(tuple(fields))
    return honest.copied_rows(*rows)


# --- all of them -----------------------------------------------------------------------------


def read_stream(sent: bytes, limit_bytes: int | None) -> str:
    """Return why the lie was refused; empty if it was not."""
    reading = Reading(limit_bytes=limit_bytes)
    ended = reading.read(sent)
    reading.check()
    return "" if ended is None else str(ended)


def read_copy(sent: bytes, make: Callable[[], Decoder], limit_bytes: int | None) -> str:
    """Return why the lie was refused; empty if it was not."""
    decoder = make()
    cutter = Cutter()
    if limit_bytes is not None:
        cutter = Cutter(limit_bytes, lambda: CopiedChange(limit_bytes // 4))
    try:
        decoder.feed(*_cut(cutter, sent))
        decoder.finish()
    except ProtocolError as error:
        return str(error)
    return ""


def _cut(cutter: Cutter, sent: bytes) -> tuple[bytes, Any, Any]:
    buffer, found = cutter.feed([sent])
    return buffer, found.starts, found.ends


def _rows() -> honest.Script:
    return honest.copied(honest.VALUES, (b"8", None, b"x", b"infinity"))


def _looked() -> honest.Script:
    rows = [(*honest.VALUES, age, deleted, b"cursor") for age, deleted in _AGES]
    return honest.copied(*rows)


_AGES = ((b"3", b"false"), (b"9", b"true"))
Case = tuple[Callable[[], honest.Script], Callable[[bytes], str]]


def _packed_case(packing: Packing) -> Case:
    def read(sent: bytes) -> str:
        return read_copy(sent, lambda: ColumnarDecoder(PACKED, Lsn(7), AT, 64, packing), None)

    return lambda: columns(packing), read


CASES: dict[str, Case] = {
    "stream": (honest.transaction, lambda sent: read_stream(sent, None)),
    "stream, shortened": (honest.transaction, lambda sent: read_stream(sent, 60)),
    "segments": (honest.segments, lambda sent: read_stream(sent, None)),
    "segments, shortened": (honest.segments, lambda sent: read_stream(sent, 60)),
    "two phases": (honest.two_phases, lambda sent: read_stream(sent, None)),
    "beside": (honest.beside, lambda sent: read_stream(sent, None)),
    "rows": (_rows, lambda sent: read_copy(sent, lambda: CopyDecoder(COPIED, Lsn(7), AT), None)),
    "looked": (_looked, lambda sent: read_copy(sent, Looking, None)),
    "single": (
        single,
        lambda sent: read_copy(sent, lambda: Unpacking(is_ahead=False), None),
    ),
    "single, shortened": (
        single,
        lambda sent: read_copy(sent, lambda: Unpacking(is_ahead=False), 60),
    ),
    "ahead": (
        ahead,
        lambda sent: read_copy(sent, lambda: Unpacking(is_ahead=True), None),
    ),
    **{f"columns, {packing.name.lower()}": _packed_case(packing) for packing in Packing},
}
TAKEN = CASES.keys() - {"two phases", "beside"}
"""Of which the honest script is read to its end."""


def assert_held(read: Callable[[bytes], str], lies: Iterator[tuple[str, bytes]]) -> None:
    """They raise nothing but ProtocolError, and some are refused."""
    refused = 0
    for name, sent in lies:
        try:
            said = read(sent)
        except BaseException as error:
            error.add_note(name)
            raise
        assert len(said.encode()) <= SAID_BYTES, name
        refused += bool(said)
    assert refused


@pytest.mark.parametrize("case", sorted(TAKEN))
def test_the_truth_is_taken(case: str) -> None:
    script, read = CASES[case]
    assert not read(b"".join(written(message) for _, message in script()))


@pytest.mark.parametrize("case", CASES)
def test_a_few_lies_are_protocol_errors_or_harmless(case: str, seed: int) -> None:
    script, read = CASES[case]
    lies = [*lying_scripts(script())]
    assert_held(read, iter(random.Random(seed).sample(lies, min(FEW, len(lies)))))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_every_lie_is_a_protocol_error_or_harmless(case: str) -> None:
    script, read = CASES[case]
    assert_held(read, lying_scripts(script()))
