"""Databases that are not in UTF-8, through the daemon and back (I7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.demo.comparison import await_caught_up
from ingestd.schema import TableId
from ingestd.sink.read import read_raw
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 30.0


def recreate(database: Database, encoding: str) -> None:
    with database.server.connect() as connection:
        connection.execute(f"DROP DATABASE {database.name}".encode())
        connection.execute(
            f"CREATE DATABASE {database.name} ENCODING {encoding} TEMPLATE template0"
            " LC_COLLATE 'C' LC_CTYPE 'C'".encode()
        )


@pytest.mark.parametrize(
    ("encoding", "stored"),
    [
        ("LATIN1", b"\xe4\xdf\x61"),
        ("EUC_JP", b"\xc6\xfc\xcb\xdc"),
        ("SQL_ASCII", "ä€".encode()),
        ("SQL_ASCII", b"\xff\x61\xc3"),
    ],
)
def test_lossless_whatever_the_database_is_encoded_in(
    database: Database, lake: Path, make_daemon: MakeDaemon, *, encoding: str, stored: bytes
) -> None:
    """As UTF-8; what a database without an encoding has that is not is kept as its bytes' hex."""
    recreate(database, encoding)
    value = f"convert_from('\\x{stored.hex()}', '{encoding}')"
    database.execute(
        "CREATE TABLE words (id int PRIMARY KEY, word text, words text[], code char(9))",
        f"INSERT INTO words VALUES (1, {value}, ARRAY[{value}, 'b'], {value})",
        "INSERT INTO words VALUES (2, 'a', '{b}', '')",
    )
    extra = f'slot = "{database.name}"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start_ready(LIMIT_S)
    database.execute("INSERT INTO words SELECT id + 10, word, words, code FROM words")
    with database.server.connect() as connection:
        await_caught_up(connection, database.name, LIMIT_S)
    raw = read_raw(str(lake), "shop", TableId("public", "words"))
    found = {
        row["id"]: [row[name] for name in ("word", "words", "code", "_cdc_raw")]
        for row in raw.to_pylist(maps_as_pydicts="strict")
        if row["_cdc_op"] != "t"
    }
    odd, plain = given_back(encoding, stored), ["a", ["b"], " " * 9, None]
    assert found == {1: odd, 2: plain, 11: odd, 12: plain}


def given_back(encoding: str, stored: bytes) -> list[Any]:
    """What the row with these bytes has in its three columns, and in `_cdc_raw`."""
    try:
        word = stored.decode("utf-8" if encoding == "SQL_ASCII" else encoding)
    except UnicodeDecodeError:
        kept = {"word": stored, "words": b"{" + stored + b",b}", "code": stored.ljust(9)}
        return [None, None, None, {name: f"\\x{data.hex()}" for name, data in kept.items()}]
    characters = len(stored if encoding == "SQL_ASCII" else word)
    return [word, [word, "b"], word + " " * (9 - characters), None]
