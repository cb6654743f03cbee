"""Databases that are not in UTF-8, through the daemon and back (I7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.schema import TableId
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config
from tests.integration.test_catch_up import run_until_rows
from tests.unit.pipeline.fixtures import watch

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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("encoding", "stored"),
    [
        ("LATIN1", b"\xe4\xdf\x61"),
        ("EUC_JP", b"\xc6\xfc\xcb\xdc"),
        ("WIN1252", b"a\x81b"),
        ("WIN1252", b"\xc4\x81"),  # which would be UTF-8
        ("EUC_JIS_2004", b"\xc6\xfc\xcb\xdc"),
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
        codecs = {"SQL_ASCII": "utf-8", "WIN1252": "cp1252"}
        word = stored.decode(codecs.get(encoding, encoding))
    except UnicodeDecodeError:
        kept = {"word": stored, "words": b"{" + stored + b",b}", "code": stored.ljust(9)}
        return [None, None, None, {name: f"\\x{data.hex()}" for name, data in kept.items()}]
    characters = len(stored if encoding == "SQL_ASCII" else word)
    return [word, [word, "b"], word + " " * (9 - characters), None]


async def test_lossless_a_backlog_of_a_database_without_an_encoding(
    database: Database, lake: Path
) -> None:
    """Drained through the SQL functions, whose connection is asked for texts in between."""
    recreate(database, "SQL_ASCII")
    database.execute("CREATE TABLE t (id int PRIMARY KEY, word text)")
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.t"],
        slot=database.name,
        publication=database.name,
    )

    def pipeline() -> Pipeline:
        drains = DrainPolicy(above_bytes=-1)
        capture = WalCapture("shop", settings, memory_bytes=64 << 20, drain_policy=drains)
        often = PipelinePolicy(EpochPolicy(max_delay_s=0.1, max_bytes=1 << 20))
        return Pipeline(capture, DeltaLake(str(lake), "shop"), often, watch())

    await run_until_rows(pipeline(), lake, 1, database.dsn)  # the `t` of the snapshot
    odd = r"convert_from('\xff61', 'SQL_ASCII')"
    database.execute(f"INSERT INTO t VALUES (1, 'ä'), (2, {odd})")
    await run_until_rows(pipeline(), lake, 3, database.dsn)
    rows = read_raw(str(lake), "shop", TableId("public", "t")).to_pylist()
    found = {row["id"]: (row["word"], row["_cdc_raw"]) for row in rows if row["_cdc_op"] == "c"}
    assert found == {1: ("ä", None), 2: (None, [("word", r"\xff61")])}
