"""The messages of an honest server, field by field, from which `lies` are made.

Source: PostgreSQL documentation, "Message Formats", "Streaming Replication Protocol", "Logical
Replication Message Formats"; COPY, "Binary Format".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.harness.lies import Enclosing, Field, Message, kind, number, raw, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Script = list[tuple[str, Message]]
Fields = tuple[Field | Enclosing, ...]

OID, ROOT = 16_384, 16_390
LSN = 0x1_6B37_4828
TIME = 786_000_000_000_000
XID = 742
COLUMNS = (
    ("id", 23, -1, True),
    ("note", 25, -1, False),
    ("amount", 1700, (12 << 16 | 2) + 4, False),
    ("at", 1184, -1, False),
)
VALUES = (b"7", b"a note", b"12.50", b"2024-05-06 07:08:09+00")


def backend(letter: str, *fields: Field | Enclosing) -> Message:
    """Return a message of the backend."""
    return (kind(letter), Enclosing("length", 4), *fields)


def copy_data(*fields: Field | Enclosing) -> Message:
    """Return a CopyData message."""
    return backend("d", *fields)


def xlog_data(*fields: Field | Enclosing) -> Message:
    """Return an XLogData message that carries a message of pgoutput."""
    header = (kind("w"), number("start", "Q", LSN), number("end", "Q", LSN), number("sent", "q", 0))
    return copy_data(*header, *fields)


def keepalive(position: int = LSN + 56, *, asks: bool = False) -> Message:
    """Return a keepalive of the primary."""
    fields = (number("end", "Q", position), number("sent", "q", TIME), number("asks", "B", asks))
    return copy_data(kind("k"), *fields)


# --- pgoutput --------------------------------------------------------------------------------


def _tuple(letter: str, values: Sequence[bytes | None]) -> Fields:
    fields: list[Field] = [
        Field("tuple", "c", letter.encode()),
        number("columns", "h", len(values)),
    ]
    for value in values:
        if value is None:
            fields.append(Field("column", "c", b"n"))
        else:
            fields.append(Field("column", "c", b"t"))
            fields += [number("value's length", "i", len(value)), raw("value", value)]
    return tuple(fields)


def _xid(xid: int | None) -> Fields:
    return () if xid is None else (number("xid", "I", xid),)


def begin(lsn: int = LSN) -> Fields:
    """Return a Begin."""
    return kind("B"), number("final_lsn", "Q", lsn), number("time", "q", TIME), *_xid(XID)


def commit(lsn: int = LSN) -> Fields:
    """Return a Commit."""
    lsns = number("commit_lsn", "Q", lsn), number("end_lsn", "Q", lsn + 48)
    return kind("C"), number("flags", "B", 0), *lsns, number("time", "q", TIME)


def relation(xid: int | None = None, oid: int = OID, name: str = "t") -> Fields:
    """Return a Relation."""
    fields: list[Field | Enclosing] = [kind("R"), *_xid(xid), number("oid", "I", oid)]
    fields += [text("schema", "public"), text("relation", name)]
    fields += [Field("identity", "c", b"d"), number("columns", "h", len(COLUMNS))]
    for column, type_oid, typmod, is_key in COLUMNS:
        fields += [number("flags", "B", is_key), text("column", column)]
        fields += [number("type", "I", type_oid), number("typmod", "i", typmod)]
    return tuple(fields)


def type_(xid: int | None = None) -> Fields:
    """Return a Type."""
    return kind("Y"), *_xid(xid), number("oid", "I", 99), text("schema", "s"), text("name", "mood")


def origin() -> Fields:
    """Return an Origin."""
    return kind("O"), number("lsn", "Q", LSN), text("name", "elsewhere")


def change(letter: str, *tuples: Fields, xid: int | None = None, oid: int = OID) -> Fields:
    """Return an Insert, Update or Delete."""
    return (
        kind(letter),
        *_xid(xid),
        number("oid", "I", oid),
        *(f for each in tuples for f in each),
    )


def insert(xid: int | None = None) -> Fields:
    """Return an Insert."""
    return change("I", _tuple("N", VALUES), xid=xid)


def truncate(xid: int | None = None) -> Fields:
    """Return a Truncate."""
    oids = number("oid", "I", OID), number("oid", "I", ROOT)
    return kind("T"), *_xid(xid), number("relations", "i", 2), number("options", "B", 0), *oids


def logical_message(xid: int | None = None, prefix: str = "ingestd.ddl") -> Fields:
    """Return a Message."""
    fields = number("flags", "B", 1), number("lsn", "Q", LSN), text("prefix", prefix)
    return kind("M"), *_xid(xid), *fields, Enclosing("content's length"), raw("content", b"{}")


def transaction() -> Script:
    """Return a stream: a transaction with every kind of message, another, and a keepalive."""
    key = _tuple("K", (VALUES[0], None, None, None))
    old, new = _tuple("O", VALUES), _tuple("N", VALUES)
    found = {
        "Begin": begin(),
        "Origin": origin(),
        "Type": type_(),
        "Relation": relation(),
        "Relation of another": relation(oid=ROOT, name="root"),
        "Insert": insert(),
        "Update": change("U", new),
        "Update of a key": change("U", key, new),
        "Update of a whole row": change("U", old, new),
        "Delete": change("D", key),
        "Delete of a whole row": change("D", old),
        "Truncate": truncate(),
        "Message": logical_message(),
        "Commit": commit(),
        "next Begin": begin(LSN + 100),
        "next Insert": insert(),
        "next Commit": commit(LSN + 100),
    }
    return [*_stream(found), ("keepalive", keepalive(LSN + 148, asks=True))]


def _stream(found: Mapping[str, Fields]) -> Script:
    messages = [(name, xlog_data(*fields)) for name, fields in found.items()]
    return [("CopyBothResponse", copy_response("W")), *messages]


def segments() -> Script:
    """Return a stream: a transaction sent while in progress, with an aborted sub-transaction."""
    sub = XID + 1
    start = kind("S"), *_xid(XID)
    stop = (kind("E"),)
    lsns = number("commit_lsn", "Q", LSN), number("end_lsn", "Q", LSN + 48)
    found = {
        "Stream Start": (*start, number("is first", "B", 1)),
        "Origin": origin(),
        "Relation": relation(XID),
        "Relation of another": relation(XID, ROOT, "root"),
        "Insert": insert(XID),
        "Stream Stop": stop,
        "Stream Start again": (*start, number("is first", "B", 0)),
        "Insert undone": insert(sub),
        "Truncate": truncate(sub),
        "Message": logical_message(XID),
        "Stream Stop again": stop,
        "Stream Abort": (kind("A"), *_xid(XID), number("subxid", "I", sub)),
        "Stream Commit": (
            *(kind("c"), *_xid(XID), number("flags", "B", 0)),
            *(*lsns, number("time", "q", TIME)),
        ),
        "Begin": begin(LSN + 100),
        "Commit": commit(LSN + 100),
    }
    return [*_stream(found), ("keepalive", keepalive(LSN + 148))]


def two_phases() -> Script:
    """Return a stream of prepared transactions, which the client never requests."""
    gid = text("gid", "g")
    lsns = number("prepare_lsn", "Q", LSN), number("end_lsn", "Q", LSN + 48)
    times = number("time", "q", TIME), *_xid(XID), gid
    found: dict[str, Fields] = {
        "Begin Prepare": (kind("b"), *lsns, *times),
        "Insert": insert(),
        "Prepare": (kind("P"), number("flags", "B", 0), *lsns, *times),
        "Commit Prepared": (kind("K"), number("flags", "B", 0), *lsns, *times),
        "Rollback Prepared": (kind("r"), number("flags", "B", 0), *lsns, *times),
        "Stream Prepare": (kind("p"), number("flags", "B", 0), *lsns, *times),
    }
    return _stream(found)


# --- besides data ----------------------------------------------------------------------------


def error(letter: str = "E", code: str = "XX000", said: str = "internal error") -> Message:
    """Return an ErrorResponse or a NoticeResponse."""
    told = {"S": "ERROR", "V": "ERROR", "C": code, "M": said, "F": "walsender.c", "L": "1"}
    fields: list[Field] = []
    for field, value in told.items():
        fields += [Field("field", "c", field.encode()), text(field, value)]
    return backend(letter, *fields, Field("end", "c", b"\0"))


def parameter_status() -> Message:
    """Return a ParameterStatus."""
    return backend("S", text("name", "TimeZone"), text("value", "UTC"))


def notification() -> Message:
    """Return a NotificationResponse."""
    return backend("A", number("pid", "i", 7), text("channel", "c"), text("payload", ""))


def primary_status() -> Message:
    """Return a message that the primary sends only on request."""
    return copy_data(kind("s"), number("lsn", "Q", LSN), *_xid(XID), *_xid(0), number("t", "q", 0))


def copy_response(letter: str, columns: int = 0) -> Message:
    """Return a CopyOutResponse ('H') or CopyBothResponse ('W')."""
    formats = [number("format", "h", int(letter == "H")) for _ in range(columns)]
    return backend(letter, number("format", "B", 0), number("columns", "h", columns), *formats)


def ready() -> Message:
    """Return a ReadyForQuery."""
    return backend("Z", Field("status", "c", b"I"))


def command_complete(tag: str) -> Message:
    """Return a CommandComplete."""
    return backend("C", text("tag", tag))


def copy_done() -> Message:
    """Return a CopyDone."""
    return backend("c")


def beside() -> Script:
    """Return a stream with messages that may come at any time, and an error at its end."""
    return [
        ("CopyBothResponse", copy_response("W")),
        ("keepalive", keepalive()),
        ("Notice", error("N", "00000", "hear")),
        ("ParameterStatus", parameter_status()),
        ("Notification", notification()),
        ("Error", error()),
    ]


# --- COPY ------------------------------------------------------------------------------------


def copy_header() -> Fields:
    """Return the header of a binary COPY."""
    signature = raw("signature", b"PGCOPY\n\xff\r\n\0")
    return signature, number("flags", "i", 0), number("extension", "i", 0)


def copy_row(*values: bytes | None) -> Fields:
    """Return a row of a binary COPY."""
    fields: list[Field] = [number("fields", "h", len(values))]
    for value in values:
        fields.append(number("value's length", "i", -1 if value is None else len(value)))
        if value is not None:
            fields.append(raw("value", value))
    return tuple(fields)


def copied(*rows: Sequence[bytes | None]) -> Script:
    """Return a complete COPY of these rows, beginning with its CopyOutResponse."""
    return copied_rows(*(copy_row(*row) for row in rows))


def copied_rows(*rows: Fields) -> Script:
    """Return a complete COPY of rows that are given as fields."""
    [first, *others] = rows
    script: Script = [("CopyOutResponse", copy_response("H", 3))]
    script.append(("first row", copy_data(*copy_header(), *first)))
    script += [("row", copy_data(*row)) for row in others]
    return [
        *script,
        ("trailer", copy_data(number("trailer", "h", -1))),
        ("CopyDone", copy_done()),
        ("CommandComplete", command_complete(f"COPY {len(rows)}")),
        ("ReadyForQuery", ready()),
    ]
