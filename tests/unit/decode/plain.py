"""The reference decoder: slow, plain, one message and one value at a time.

It gives the rows of each table as dicts in order, and no chunks: how a stream is cut into chunks
must not change what is in it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from ingestd.decode.pgoutput.relation import Relation, RelationColumn, ResolveRelation
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Table, TableId

EPOCH_US = 946_684_800_000_000
INF = float("inf")


class Refused(Exception):  # noqa: N818
    pass


@dataclass
class Plain:
    resolve: ResolveRelation
    rows: dict[TableId, list[dict[str, Any]]] = field(default_factory=dict)
    commit_times: list[int] = field(default_factory=list)
    position: int = 0
    relations: dict[int, tuple[Relation, Table | None]] = field(default_factory=dict)
    seq: int = 0
    begin: tuple[int, int, int] = (0, 0, 0)

    def feed(self, message: bytes) -> None:
        reader = Reader(message)
        kind = reader.take("c")[0].decode()
        if kind == "B":
            lsn, ts, xid = reader.take("QqI")
            # To the nearest time of the years 1 to 9999.
            at = min(max(ts + EPOCH_US, -62_135_596_800_000_000), 253_402_300_799_999_999)
            self.begin, self.seq = (lsn, at, xid), 0
        elif kind == "C":
            _, _, end, _ = reader.take("BQQq")
            self.position = max(self.position, end)
            if self.seq:
                self.commit_times.append(self.begin[1])
        elif kind == "R":
            relation = read_relation(reader)
            self.relations[relation.oid] = (relation, self.resolve(relation))
        elif kind in "IUD":
            self.change(kind, reader)
        elif kind == "T":
            count, _ = reader.take("iB")
            for oid in reader.take(f"{count}I"):
                table = self.relations[oid][1]
                if table is not None:
                    self.emit(table, "t", {}, None)

    def change(self, kind: str, reader: Reader) -> None:
        (oid,) = reader.take("I")
        relation, table = self.relations[oid]
        (tag,) = reader.take("c")
        old, old_tag = None, None
        if tag in b"KO":
            old, old_tag = read_tuple(reader, relation), tag
            if kind == "U":
                (tag,) = reader.take("c")
        new = old if kind == "D" else read_tuple(reader, relation)
        assert reader.at == len(reader.message)
        assert new is not None
        if kind == "D" and old_tag == b"K":
            old = None
        if table is not None:
            self.emit(table, {"I": "c", "U": "u", "D": "d"}[kind], new, old)

    def emit(self, table: Table, op: str, new: dict[str, Any], old: dict[str, Any] | None) -> None:
        self.seq += 1
        raw: dict[str, str] = {}
        row: dict[str, Any] = {}
        for column in table.columns:
            row[column.name] = typed(new.get(column.name), column.type, column.name, raw)
        unchanged = [c.name for c in table.columns if new.get(c.name) is Ellipsis]
        before = None
        if old is not None:
            before = {
                n: typed(old.get(n), table.column(n).type, f"_cdc_before.{n}", raw)
                for n in table.before
            }
        lsn, ts, xid = self.begin
        row |= {
            "_cdc_op": op,
            "_cdc_lsn": lsn,
            "_cdc_seq": self.seq,
            "_cdc_xid": xid,
            "_cdc_ts": ts,
            "_cdc_before": before,
            "_cdc_unchanged": unchanged or None,
            "_cdc_raw": raw or None,
        }
        self.rows.setdefault(table.id, []).append(row)


@dataclass
class Reader:
    message: bytes
    at: int = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f">{layout}", self.message, self.at)
        self.at += struct.calcsize(f">{layout}")
        return found

    def text(self) -> str:
        end = self.message.index(b"\0", self.at)
        found = self.message[self.at : end].decode()
        self.at = end + 1
        return found

    def bytes(self, length: int) -> bytes:
        found = self.message[self.at : self.at + length]
        self.at += length
        return found


def read_relation(reader: Reader) -> Relation:
    (oid,) = reader.take("I")
    schema, name = reader.text() or "pg_catalog", reader.text()
    identity, count = reader.take("ch")
    columns = []
    for _ in range(count):
        (flags,) = reader.take("B")
        column = reader.text()
        type_oid, typmod = reader.take("Ii")
        columns.append(RelationColumn(column, type_oid, typmod, bool(flags & 1)))
    return Relation(oid, TableId(schema, name), identity.decode(), tuple(columns))


def read_tuple(reader: Reader, relation: Relation) -> dict[str, Any]:
    """Bytes; None for null; Ellipsis for unchanged."""
    (count,) = reader.take("h")
    assert count == len(relation.columns)
    found: dict[str, Any] = {}
    for column in relation.columns:
        (kind,) = reader.take("c")
        if kind == b"t":
            (length,) = reader.take("i")
            found[column.name] = reader.bytes(length)
        else:
            found[column.name] = None if kind == b"n" else ...
    return found


def typed(value: Any, kind: pa.DataType, key: str, raw: dict[str, str]) -> Any:
    if value is None or value is ...:
        return None
    try:
        return parse(value, kind)
    except Refused:
        try:
            raw[key] = value.decode()
        except UnicodeDecodeError:
            raw[key] = "\\x" + value.hex()
        return None


def parse(value: bytes, kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return [None if e is None else parse(e, kind.value_type) for e in read_array(value)]
    if pa.types.is_struct(kind):
        fields = read_record(value)
        if len(fields) != kind.num_fields:
            raise Refused
        return {
            f.name: None if e is None else parse(e, f.type)
            for f, e in zip(kind, fields, strict=True)
        }
    if pa.types.is_decimal128(kind):
        return parse_decimal(value, kind.precision, kind.scale)
    if pa.types.is_integer(kind):
        return parse_integer(value, kind.bit_width)
    return PARSERS[kind](value)


def parse_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Refused from error


def parse_bytes(value: bytes) -> bytes:
    require(rb"\\x([0-9a-f]{2})*", value)
    return bytes.fromhex(value[2:].decode())


def parse_bool(value: bytes) -> bool:
    require(rb"[tf]", value)
    return value == b"t"


def parse_integer(value: bytes, bits: int) -> int:
    require(rb"0|-?[1-9][0-9]*", value)
    number = int(value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise Refused
    return number


def parse_decimal(value: bytes, precision: int, scale: int) -> Decimal:
    fraction = rb"\.[0-9]{%d}" % scale if scale else b""
    require(rb"-?(0|[1-9][0-9]*)" + fraction, value)
    number = Decimal(value.decode())
    if number.is_zero() and value.startswith(b"-"):
        raise Refused
    if len(value.lstrip(b"-").replace(b".", b"").lstrip(b"0")) > precision:
        raise Refused
    return number


def parse_float(value: bytes) -> float:
    require(rb"NaN|-?Infinity|-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?", value)
    if value.endswith(b"."):
        raise Refused
    number = float(value)
    if (number == 0 and value not in {b"0", b"-0"}) or (
        number in {INF, -INF} and b"I" not in value
    ):
        raise Refused
    return number


def parse_float4(value: bytes) -> float:
    """Return the nearest number of 32 bits, not that of the nearest number of 64 bits."""
    wide = parse_float(value)
    with np.errstate(all="ignore"):
        near = np.float32(wide)
    if not np.isfinite(near) or wide == 0:
        if not math.isfinite(wide) or wide == 0:
            return float(near)
        near = np.copysign(np.finfo(np.float32).max, near)
    exact = Fraction(value.decode())
    with np.errstate(all="ignore"):
        around = [near, np.nextafter(near, np.float32(-INF)), np.nextafter(near, np.float32(INF))]
    end = Fraction(2**128 - 2**103)  # from here on it is infinity
    if abs(exact) >= end:
        raise Refused
    finite = [n for n in around if np.isfinite(n)]
    nearest = min(finite, key=lambda n: (abs(Fraction(float(n)) - exact), n.view(np.uint32) & 1))
    if nearest == 0:
        raise Refused
    return float(nearest)


def parse_date(value: bytes) -> date:
    require(rb"[0-9]{4}-[0-9]{2}-[0-9]{2}", value)
    try:
        return date.fromisoformat(value.decode())
    except ValueError as error:
        raise Refused from error


def parse_timestamp(value: bytes) -> datetime:
    require(rb"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{0,5}[1-9])?", value)
    try:
        return datetime.fromisoformat(value.decode())
    except ValueError as error:
        raise Refused from error


def parse_instant(value: bytes) -> datetime:
    if not value.endswith(b"+00"):
        raise Refused
    return parse_timestamp(value[:-3]).replace(tzinfo=ZoneInfo("UTC"))


def read_array(value: bytes) -> list[bytes | None]:
    """Read it loosely; what the server would have written otherwise was not written by it."""
    elements = [] if value == b"{}" else split(value, b"{}", escapes=True)
    found = [
        e[1:] if e.startswith(b"q") else None if e[1:].upper() == b"NULL" else e[1:]
        for e in elements
    ]
    if write_array(found) != value:
        raise Refused
    return found


def write_array(elements: list[bytes | None]) -> bytes:
    return b"{" + b",".join(array_element(e) for e in elements) + b"}"


def array_element(value: bytes | None) -> bytes:
    if value is None:
        return b"NULL"
    if value and value.upper() != b"NULL" and not re.search(rb'["\\{},\s]', value):
        return value
    return b'"' + re.sub(rb'(["\\])', rb"\\\1", value) + b'"'


def read_record(value: bytes) -> list[bytes | None]:
    found = [
        e[1:] if e.startswith(b"q") else e[1:] or None for e in split(value, b"()", escapes=False)
    ]
    if write_record(found) != value:
        raise Refused
    return found


def write_record(fields: list[bytes | None]) -> bytes:
    return b"(" + b",".join(record_field(f) for f in fields) + b")"


def record_field(value: bytes | None) -> bytes:
    if value is None:
        return b""
    if value and not re.search(rb'["\\(),\s]', value):
        return value
    return b'"' + re.sub(rb'(["\\])', rb"\1\1", value) + b'"'


def split(value: bytes, brackets: bytes, *, escapes: bool) -> list[bytes]:
    """Split between the brackets at commas outside quotes; `q` or `u` marks what was quoted."""
    if len(value) < 2 or bytes((value[0], value[-1])) != brackets:
        raise Refused
    found, inside = [bytearray(b"u")], False
    letters = [value[i : i + 1] for i in range(1, len(value) - 1)]
    while letters:
        letter = letters.pop(0)
        if letter == b"\\":
            if not letters:
                raise Refused
            found[-1] += letters.pop(0)
        elif letter == b'"' and not escapes and inside and letters[:1] == [b'"']:
            found[-1] += letters.pop(0)
        elif letter == b'"':
            inside = not inside
            found[-1][:1] = b"q"
        elif letter == b"," and not inside:
            found.append(bytearray(b"u"))
        else:
            found[-1] += letter
    if inside:
        raise Refused
    return [bytes(f) for f in found]


def require(pattern: bytes, value: bytes) -> None:
    if re.fullmatch(pattern, value) is None:
        raise Refused


PARSERS: dict[pa.DataType, Callable[[bytes], Any]] = {
    pa.string(): parse_text,
    pa.binary(): parse_bytes,
    pa.bool_(): parse_bool,
    pa.float32(): parse_float4,
    pa.float64(): parse_float,
    pa.date32(): parse_date,
    TIMESTAMP_NTZ: parse_timestamp,
    TIMESTAMP: parse_instant,
}
