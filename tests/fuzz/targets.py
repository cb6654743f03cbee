"""What is fuzzed: `TARGETS`, by name. Each takes an input and raises on unexpected results.

Only ProtocolError may leave the decoder. What both it and the plain one take must be the same;
where the grammar is simple, both must also refuse the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from ingestd.decode.copy.columnar import ColumnarDecoder
from ingestd.decode.copy.packing import Packing
from ingestd.decode.copy.rows import CopyDecoder
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.messages import split_frames
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.decode.type_mapping import lake_type
from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import texts_of
from ingestd.decode.wire.backend_messages import Cutter, error_fields
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId, with_before
from tests.fuzz.framing import feeds_of, laid_out
from tests.fuzz.plain import (
    BEGINS,
    PlainOrder,
    copied_rows,
    frames,
    socket_messages,
)
from tests.unit.decode.plain import Plain, Refused, typed
from tests.unit.decode.test_stream_equals_plain import rows_of
from tests.unit.decode.test_streamed_transactions import MemorySpool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.model.changes import ChangeSet, TableBatch

T = TypeVar("T")
Target = Callable[[bytes], bool]
"""Says whether both decoders took the input: then what they gave was compared."""
REFUSES = (Refused, AssertionError, ArithmeticError, LookupError, ValueError, struct.error)
"""What the plain decoders raise at bytes that they do not take."""

AT = datetime(2024, 5, 6, 7, 8, 9, 123, tzinfo=UTC)
NUMERIC_12_2 = (12 << 16 | 2) + 4
TYPES = (
    (16, -1),  # bool
    (20, -1),
    (21, -1),
    (23, -1),
    (700, -1),
    (701, -1),
    (25, -1),
    (17, -1),  # bytea
    (1082, -1),  # date
    (1114, -1),
    (1184, -1),
    (1700, NUMERIC_12_2),
    (1700, (30 << 16 | 5) + 4),
    (1700, -1),
    (1007, -1),  # int4[]
    (1009, -1),  # text[]
    (1231, NUMERIC_12_2),  # numeric[]
    (2950, -1),  # uuid
)
"""(OID, typmod): what the columns of copied tables are, and what single values are cast to."""


def _table(types: Sequence[tuple[int, int]], *, nullable: bool = True) -> Table:
    columns = tuple(
        Column(f"c{n}", oid, typmod, lake_type(oid, typmod), nullable=nullable and n > 0)
        for n, (oid, typmod) in enumerate(types)
    )
    return Table(TableId("public", "t"), 1, columns, key=("c0",), before=("c0",))


COPIED = _table([(23, -1), (25, -1), (1082, -1), (1700, NUMERIC_12_2), (1009, -1)])
PACKED = _table([(20, -1), (23, -1), (25, -1), (17, -1), (1082, -1), (1184, -1), (701, -1)])


def resolve(relation: Relation) -> Table | None:
    """Relation 3 is not captured; relation 2 has complete old rows."""
    if relation.oid == 3 or any(c.name.startswith("_cdc_") for c in relation.columns):
        return None
    return with_before(table_of(relation), full=relation.oid == 2)


# --- the socket ------------------------------------------------------------------------------


def wire(data: bytes) -> bool:
    """Three bytes choose two cuts and more, the rest is what the socket gives."""
    if len(data) < 3:
        return False
    stream = data[3:]
    cuts = sorted(c * len(stream) // 255 for c in data[:2])
    pieces = [stream[: cuts[0]], stream[cuts[0] : cuts[1]], stream[cuts[1] :]]
    expected = _plain(lambda: socket_messages(stream)[:2])
    cutter, found, last = Cutter(), [], None
    if stream[:1] not in BEGINS:  # what says that data follows came before
        cutter.feed([b"W\0\0\0\x07\0\0\0"])
    try:
        for piece in pieces:
            if last is None:
                buffer, part = cutter.feed([piece])
                found += _messages(buffer, part.starts, part.ends)
                last = part.last
    except ProtocolError:
        assert expected is None
        return False
    assert (found, last) == expected
    if last is not None:
        error_fields(last[1])
    return True


def replication(data: bytes) -> bool:
    """CopyData messages of a stream, to what they carry."""
    [messages, *_] = feeds_of(data)
    expected = _plain(lambda: frames(messages))
    buffer, starts, ends = laid_out(messages)
    try:
        found = split_frames(buffer, starts, ends)
    except ProtocolError:
        assert expected is None
        return False
    payloads = _messages(buffer, found.starts, found.ends)
    assert (payloads, found.keepalive, found.reply_requested) == expected
    return True


# --- the stream ------------------------------------------------------------------------------


def stream(data: bytes) -> bool:
    """A byte chooses how much is held back, then come pgoutput messages."""
    if not data:
        return False
    feeds = feeds_of(data[1:])
    if any(message[:1] == b"L" for messages in feeds for message in messages):
        return False  # of our own making (`decode/pgoutput/shortening.py`)
    decoder = PgoutputDecoder(resolve, hold_bytes=(0, 60, 300, 1 << 20)[data[0] & 3])
    change_sets: list[ChangeSet] = []
    try:
        for messages in feeds:
            change_sets += decoder.feed(*laid_out(messages))
    except ProtocolError:
        return False
    _validate([batch for change_set in change_sets for batch in change_set.batches])
    flat = [m for messages in feeds for m in messages]
    if not flat or flat[-1][:1] != b"C":
        return False  # what is held back is not given yet
    plain = _plain(lambda: _decoded_plainly(flat))
    if plain is None:
        return False
    found = {id_: _by_position(rows) for id_, rows in rows_of(change_sets).items()}
    expected = {id_: _by_position(rows) for id_, rows in plain.rows.items()}
    assert repr(sorted(found.items())) == repr(sorted(expected.items()))  # in repr NaN is NaN
    times = np.concatenate([c.commit_times for c in change_sets]).tolist() if change_sets else []
    assert times == plain.commit_times
    assert (change_sets[-1].position if change_sets else 0) == plain.position
    return True


def _decoded_plainly(messages: Sequence[bytes]) -> Plain:
    plain = Plain(resolve)
    for message in messages:
        plain.feed(message)
    return plain


def streamed(data: bytes) -> bool:
    """pgoutput messages of protocol 2, with segments of open transactions."""
    if not data:
        return False
    feeds = feeds_of(data[1:])
    if any(message[:1] == b"L" for messages in feeds for message in messages):
        return False  # of our own making (`decode/pgoutput/shortening.py`)
    expected = _plain(lambda: _ordered_plainly(feeds))
    order, found = StreamedTransactions(MemorySpool()), []
    decoder = PgoutputDecoder(resolve, hold_bytes=300) if data[0] & 1 else None
    try:
        for messages in feeds:
            for buffer, starts, ends in order.feed(*laid_out(messages)):
                found += _messages(bytes(buffer), starts, ends)
                if decoder is not None:
                    decoder.feed(buffer, starts, ends)
    except ProtocolError:
        return False
    if expected is None:
        return False
    assert found == expected
    return True


def _ordered_plainly(feeds: Sequence[Sequence[bytes]]) -> list[bytes]:
    plain = PlainOrder()
    for messages in feeds:
        for message in messages:
            plain.feed(message)
    return plain.given


# --- tables ----------------------------------------------------------------------------------


def copied(data: bytes) -> bool:
    """CopyData messages of a table's rows as texts."""
    feeds = feeds_of(data)
    decoder = CopyDecoder(COPIED, Lsn(77), AT)
    batches = []
    try:
        for messages in feeds:
            batch = decoder.feed(*laid_out(messages))
            batches += [] if batch is None else [batch]
        decoder.finish()
    except ProtocolError:
        return False
    _validate(batches)
    flat = [m for messages in feeds for m in messages]
    rows = _plain(lambda: copied_rows(flat, len(COPIED.columns)))
    if rows is None:
        return False
    found = [row for batch in batches for row in batch.rows.to_pylist()]
    expected = [_typed_row(row) for row in rows]
    names = [*(c.name for c in COPIED.columns), "_cdc_raw"]
    assert repr([[row[n] for n in names] for row in found]) == repr(expected)
    return True


def _typed_row(row: Sequence[bytes | None]) -> list[Any]:
    raw: dict[str, str] = {}
    pairs = zip(row, COPIED.columns, strict=True)
    found = [typed(value, column.type, column.name, raw) for value, column in pairs]
    return [*found, list(raw.items()) or None]


def columnar(data: bytes) -> bool:
    """CopyData messages of a table's packed columns. There is no plain one; True if taken."""
    taken = [_columnar(data, packing) for packing in Packing]
    return any(taken)


def _columnar(data: bytes, packing: Packing) -> bool:
    decoder = ColumnarDecoder(PACKED, Lsn(77), AT, 64, packing)
    try:
        for messages in feeds_of(data):
            batch = decoder.feed(*laid_out(messages))
            _validate([] if batch is None else [batch])
        decoder.finish()
    except ProtocolError:
        return False
    return True


def values(data: bytes) -> bool:
    """A byte chooses the type, then come values of it."""
    if not data:
        return False
    to = lake_type(*TYPES[data[0] % len(TYPES)])
    texts = [message for messages in feeds_of(data[1:]) for message in messages]
    array, refused = cast(texts_of(pa.array(texts, pa.binary())), to)
    array.validate(full=True)
    raw: dict[str, str] = {}
    expected = [typed(text, to, str(n), raw) for n, text in enumerate(texts)]
    assert [str(n) for n in refused] == list(raw)
    found = [None if str(n) in raw else one for n, one in enumerate(array.to_pylist())]
    assert repr(found) == repr(expected)
    return True


# --- inside ----------------------------------------------------------------------------------


def _plain(decode: Callable[[], T]) -> T | None:
    """Return what the plain decoder gives; None if it refuses."""
    try:
        return decode()
    except REFUSES:
        return None


def _messages(buffer: bytes, starts: Any, ends: Any) -> list[bytes]:
    return [buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _by_position(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]))


def _validate(batches: Sequence[TableBatch]) -> None:
    for batch in batches:
        batch.rows.validate(full=True)


TARGETS: dict[str, Target] = {
    one.__name__: one for one in (wire, replication, stream, streamed, copied, columnar, values)
}
