"""What a connector reports as captured, and why the rest is not (`Connector.coverage`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from pydantic import SecretStr

from ingestd.model.errors import TableError, TransientError
from ingestd.model.schema import Column, Table, TableId
from ingestd.ports import Refused
from ingestd.postgres.polling.connector import PollingFactory
from ingestd.postgres.settings import PollingSettings, WalSettings
from ingestd.postgres.wal.connector import WalFactory
from ingestd.testing.fakes.capture import FakeDatabase
from ingestd.testing.fakes.connector import FakeFactory, FakeSettings

if TYPE_CHECKING:
    from ingestd.ports import Connector
    from tests.harness.databases import Database

GOOD, BAD = TableId("public", "good"), TableId("public", "bad")


class World(Protocol):
    """Tables GOOD, with a key, and BAD, without any identity."""

    connector: Connector


class FakeWorld:
    def __init__(self) -> None:
        column = Column("id", 23, -1, _int32(), "integer", identity=True)
        database = FakeDatabase([Table(GOOD, 1, (column,), key=("id",), before=("id",))])
        bad = Table(BAD, 2, ())
        database.refused.append(Refused(bad, TableError(BAD, "no identity", remedy="add a key")))
        self.connector = FakeFactory(database).create("shop", FakeSettings(), memory_bytes=1)


class WalWorld:
    def __init__(self, database: Database) -> None:
        database.execute("CREATE TABLE good (id int PRIMARY KEY)", "CREATE TABLE bad (id int)")
        self.connector = wal(database)


class PollingWorld:
    def __init__(self, database: Database) -> None:
        database.execute("CREATE TABLE good (id int PRIMARY KEY)", "CREATE TABLE bad (id int)")
        settings = PollingSettings.model_validate(
            {"kind": "polling", "dsn": SecretStr(database.dsn), "tables": ["public.*"]}
        )
        self.connector = PollingFactory().create("shop", settings, memory_bytes=1 << 20)


def _int32() -> Any:
    import pyarrow as pa  # noqa: PLC0415

    return pa.int32()


def wal(database: Database, *, user: str | None = None, **settings: Any) -> Connector:
    dsn = database.dsn if user is None else database.server.dsn(database.name, user=user)
    model = WalSettings.model_validate(
        {
            "kind": "wal",
            "dsn": SecretStr(dsn),
            "tables": ["public.*"],
            "slot": database.name,
            "publication": database.name,
            **settings,
        }
    )
    return WalFactory().create("shop", model, memory_bytes=1 << 20)


@pytest.fixture(params=["fake", "wal", "polling"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "fake":
        return FakeWorld()
    made = WalWorld if request.param == "wal" else PollingWorld
    return made(request.getfixturevalue("database"))


async def test_it_tells_what_is_captured_and_why_the_rest_is_not(world: World) -> None:
    found = await world.connector.coverage({})
    assert [t.id for t in found.tables] == [GOOD]
    assert found.tables[0].identity == ("id",)
    [refused] = found.refused
    assert refused.table.id == BAD
    assert "identity" in refused.error.reason or "key" in refused.error.reason
    assert refused.error.remedy
    assert found.faults == ()


async def test_a_role_without_rights_has_faults_of_its_tables_and_own(
    database: Database, stranger: str
) -> None:
    database.execute("CREATE TABLE good (id int PRIMARY KEY)")
    found = await wal(database, user=stranger).coverage({})
    assert found.tables == ()
    [refused] = found.refused
    assert refused.error.remedy == f'GRANT SELECT ON "public"."good" TO "{stranger}";'
    [fault] = found.faults
    assert "REPLICATION" in fault.what


async def test_a_table_that_is_named_and_not_there_has_no_oid(database: Database) -> None:
    found = await wal(database, tables=["public.nowhere"]).coverage({})
    [refused] = found.refused
    assert (refused.table.id, refused.table.oid) == (TableId("public", "nowhere"), 0)


async def test_no_answer_in_time_is_transient(database: Database) -> None:
    with database.connect(autocommit=False) as connection:
        connection.execute("LOCK pg_class IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(TransientError) as caught:
            await wal(database).coverage({}, timeout_s=0.3)
        connection.rollback()
    assert caught.value.reason == "timeout"


async def test_nothing_is_changed(database: Database) -> None:
    database.execute("CREATE TABLE good (id int PRIMARY KEY)")
    await wal(database).coverage({})
    assert database.slots() == []
    assert database.rows("SELECT FROM pg_publication") == []
