"""Who may write into one table's folder stops that table alone, whatever they write there (I8)."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable, Field, Schema
from deltalake.schema import PrimitiveType

from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.config import polling_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("lake writer")

TABLES = (TableId("public", "t"), TableId("public", "other"))
LIMIT_S = 40.0
BASE: dict[str, Any] = {
    "v": 1,
    "whole": [5, ""],
    "last": None,
    "floor": None,
    "ahead": None,
    "ahead_end": 0,
    "cursor": None,
    "deleted": None,
    "lsn": 0,
}
FAR = 1 << 60
BOMB = base64.b85encode(zlib.compress(bytes(1 << 30), 9)).decode()

RESUMES = {
    "bomb": json.dumps(BASE | {"whole": [5, BOMB]}),
    "text": json.dumps(BASE | {"lsn": "x"}),
    "deep": "[" * 100_000,
    "far": json.dumps(BASE | {"lsn": FAR}),
    "far ids": json.dumps(BASE | {"whole": [FAR, ""]}),
    "far floor": json.dumps(BASE | {"ahead_end": FAR}),
    "nul": json.dumps(BASE | {"cursor": "v", "floor": "\0"}),
}
FOLDERS = ("_x110000_", "_xD800_", "_xFFFFFF_", "_x0041_", "Ünï", "\udcff", "_x0000_")


def forge(lake: Path, resume: str) -> Path:
    """Put a commit that resembles a daemon's into the log of `t`."""
    log = lake / "shop/public/t/_delta_log"
    versions = sorted(int(path.stem) for path in log.glob("*.json"))
    texts = [(log / f"{n:020}.json").read_text() for n in reversed(versions)]
    actions = [json.loads(line) for text in texts for line in text.splitlines()]
    txn = next(action for action in actions if "txn" in action)
    info = {"operation": "WRITE", "timestamp": 1, "ingestdCommit": "x", "ingestdWriter": "y"}
    path = log / f"{versions[-1] + 1:020}.json"
    lines = ({"commitInfo": info | {"ingestdResume": resume}}, txn)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def highest_mb(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(s.split()[1]) >> 10 for s in status.splitlines() if s.startswith("VmHWM"))


def await_equal(database: Database, lake: Path) -> None:
    def is_equal() -> bool:
        with database.connect() as connection:
            found = compare_source(connection, str(lake), "shop", TABLES)
        return len(found) == len(TABLES) and all(c.is_equal for c in found)

    await_until(is_equal, LIMIT_S, "the lake to equal the source")


@pytest.fixture
def polled(database: Database, lake: Path, make_daemon: MakeDaemon) -> Daemon:
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table.name} (id int PRIMARY KEY, v int)",
            f"INSERT INTO {table.name} SELECT i, 0 FROM generate_series(1, 50) i",
        )
    names = [str(table) for table in TABLES]
    limits = '[limits]\nmemory = "64MB"'
    return make_daemon(polling_config(lake=lake, dsn=database.dsn, tables=names, extra=limits))


def test_a_forged_record_of_one_table_has_that_table_read_again(
    database: Database, lake: Path, polled: Daemon
) -> None:
    polled.start_ready()
    database.execute("UPDATE t SET v = 1 WHERE id = 1")
    await_equal(database, lake)
    usual_mb = highest_mb(polled)
    polled.sigterm()
    for number, (kind, resume) in enumerate(RESUMES.items(), 2):
        forge(lake, resume)
        database.execute(f"UPDATE t SET v = {number}", f"UPDATE other SET v = {number}")
        before = len(polled.events())
        polled.start_ready()
        await_equal(database, lake)
        assert highest_mb(polled) < usual_mb + 100, kind
        names = {event["event"] for event in polled.events()[before:]}
        assert not names & {"source.slot_lost", "source.unknown_error"}, kind
        polled.sigterm()


def test_folders_that_no_table_has_are_ignored(
    database: Database, lake: Path, polled: Daemon
) -> None:
    polled.start_ready()
    polled.sigterm()
    schema = Schema([Field("a", PrimitiveType("string"))])
    for name in FOLDERS:
        (lake / "shop/public" / name).mkdir()
        (lake / "shop" / name).mkdir()
    for name in FOLDERS[:2]:
        DeltaTable.create(str(lake / "shop/public" / name), schema)
    before = len(polled.events())
    polled.start_ready()
    database.execute("UPDATE t SET v = 7", "UPDATE other SET v = 7")
    await_equal(database, lake)
    assert polled.get("/metrics")[0] == polled.get("/status")[0] == 200  # type: ignore[index]
    assert "source.unknown_error" not in {e["event"] for e in polled.events()[before:]}
    polled.sigterm()
