"""Every pinned setting holds on every kind of connection, whatever sets it otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.lake.delta.read import read_raw
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.postgres.connection import session
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.pinned_settings import SETTINGS, WHERE_KNOWN
from ingestd.postgres.connection.session import connect, parameters_of
from ingestd.testing.embedded.installations import find_bindirs
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.poolers import pooler_of
from tests.harness.servers import running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

PINNED = {
    "DateStyle": "ISO, MDY", "TimeZone": "UTC", "IntervalStyle": "iso_8601",
    "extra_float_digits": "3", "bytea_output": "hex", "quote_all_identifiers": "off",
    "search_path": "pg_catalog, pg_temp", "lc_monetary": "C", "standard_conforming_strings": "on",
    "transform_null_equals": "off", "array_nulls": "on",
    "row_security": "off", "idle_in_transaction_session_timeout": "0",
    "default_transaction_read_only": "off", "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed", "jit": "off", "geqo": "on",
    "constraint_exclusion": "off", "restrict_nonsystem_relation_kind": "view, foreign-table",
    "statement_timeout": "61000", "lock_timeout": "62000", "idle_session_timeout": "0",
    "transaction_timeout": "0", "client_encoding": "UTF8",
}  # fmt: skip
OTHERWISE = {
    "DateStyle": "German", "TimeZone": "Asia/Tokyo", "IntervalStyle": "sql_standard",
    "extra_float_digits": "0", "bytea_output": "escape", "quote_all_identifiers": "on",
    "search_path": "public", "lc_monetary": "C.UTF-8",
    "standard_conforming_strings": "off", "transform_null_equals": "on", "array_nulls": "off",
    "row_security": "on", "idle_in_transaction_session_timeout": "9h",
    "default_transaction_read_only": "on", "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable", "jit": "on", "geqo": "off",
    "constraint_exclusion": "on", "restrict_nonsystem_relation_kind": "",
    "statement_timeout": "9h", "lock_timeout": "9h", "idle_session_timeout": "9h",
    "transaction_timeout": "9h", "client_encoding": "LATIN1",
}  # fmt: skip
ENVIRONMENT = {
    "PGTZ": "America/New_York", "PGDATESTYLE": "SQL, DMY", "PGGEQO": "off",
    "PGCLIENTENCODING": "LATIN1",
    "PGOPTIONS": "-c IntervalStyle=sql_standard -c bytea_output=escape",
}  # fmt: skip
timed = partial(connect, statement_timeout_s=61.0, lock_timeout_s=62.0)


def test_every_pinned_setting_is_tried() -> None:
    names = {*SETTINGS, *WHERE_KNOWN, "client_encoding", "statement_timeout", "lock_timeout"}
    assert set(PINNED) == set(OTHERWISE) == names
    assert {name: PINNED[name] for name in SETTINGS} == SETTINGS


@pytest.fixture(scope="module")
def newer() -> Iterator[PostgresServer]:
    """One that has login event triggers (17)."""
    for bindir in find_bindirs():
        if "18" in str(bindir):
            with running_server(bindir) as found:
                yield found
            return
    pytest.skip("no server has login event triggers")


@pytest.fixture
def overridden(
    way: Callable[[Database, pytest.MonkeyPatch], str], request: pytest.FixtureRequest
) -> Iterator[Database]:
    """A database, with a role `u_...` that may replicate."""
    server = request.getfixturevalue("newer" if way is by_login_trigger else "postgres")
    with fresh_database(server) as made:
        elsewhere(made, f"CREATE ROLE u_{made.name} LOGIN SUPERUSER")
        yield made
    with server.connect() as connection:
        connection.execute(f"DROP ROLE u_{made.name}".encode())


def elsewhere(database: Database, *statements: str) -> None:
    """Run them where what they set does not hold yet."""
    with database.server.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())
    database.server.share_password()


def known(database: Database) -> dict[str, str]:
    """Of the settings, those that the server has."""
    there = {name for (name,) in database.rows("SELECT name FROM pg_settings")}
    return {name: value for name, value in OTHERWISE.items() if name in there}


def by_role(database: Database, _: pytest.MonkeyPatch) -> str:
    for name, value in known(database).items():
        elsewhere(database, f"ALTER ROLE u_{database.name} SET {name} = '{value}'")
    return ""


def by_database(database: Database, _: pytest.MonkeyPatch) -> str:
    for name, value in known(database).items():
        elsewhere(database, f"ALTER DATABASE {database.name} SET {name} = '{value}'")
    return ""


def by_role_in_database(database: Database, _: pytest.MonkeyPatch) -> str:
    for name, value in known(database).items():
        role = f"u_{database.name} IN DATABASE {database.name}"
        elsewhere(database, f"ALTER ROLE {role} SET {name} = '{value}'")
    return ""


def by_login_trigger(database: Database, _: pytest.MonkeyPatch) -> str:
    sets = " ".join(
        f"PERFORM set_config('{name}', '{value}', false);"
        for name, value in known(database).items()
    )
    database.execute(
        f"CREATE FUNCTION meddle() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN "
        f"IF session_user = 'u_{database.name}' THEN {sets} END IF; END$$",
        "CREATE EVENT TRIGGER meddles ON login EXECUTE FUNCTION meddle()",
        "ALTER EVENT TRIGGER meddles ENABLE ALWAYS",
    )
    return ""


def by_options_of_the_dsn(database: Database, _: pytest.MonkeyPatch) -> str:
    return " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in known(database).items()
    )


def by_environment(_: Database, environment: pytest.MonkeyPatch) -> str:
    for name, value in ENVIRONMENT.items():
        environment.setenv(name, value)
    return ""


WAYS = (
    by_role,
    by_database,
    by_role_in_database,
    by_login_trigger,
    by_options_of_the_dsn,
    by_environment,
)


@contextlib.asynccontextmanager
async def ordinary(dsn: str, _: Database) -> AsyncIterator[LivenessCheckedConnection]:
    async with await timed(dsn) as connection:
        yield connection


@contextlib.asynccontextmanager
async def in_transaction(dsn: str, _: Database) -> AsyncIterator[LivenessCheckedConnection]:
    """As readers of snapshots are."""
    async with await timed(dsn, autocommit=False) as connection:
        await connection.execute("SELECT")
        await connection.rollback()
        yield connection


@contextlib.asynccontextmanager
async def walsender(dsn: str, _: Database) -> AsyncIterator[LivenessCheckedConnection]:
    async with await timed(dsn, replication=True) as connection:
        yield connection


@contextlib.asynccontextmanager
async def pooled(dsn: str, database: Database) -> AsyncIterator[LivenessCheckedConnection]:
    user = f"u_{database.name}"
    with pooler_of(database, "session", ignored="extra_float_digits,options", user=user) as pooler:
        options = psycopg.conninfo.conninfo_to_dict(dsn).get("options", "")
        async with await timed(make_conninfo(pooler.dsn, options=options)) as connection:
            yield connection


KINDS = (ordinary, in_transaction, walsender, pooled)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_lossless_a_setting_holds_whatever_sets_it_otherwise(
    overridden: Database,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[
        [str, Database], contextlib.AbstractAsyncContextManager[LivenessCheckedConnection]
    ],
    way: Callable[[Database, pytest.MonkeyPatch], str],
) -> None:
    options = way(overridden, monkeypatch)
    if kind is pooled:
        monkeypatch.delenv("PGGEQO", raising=False)  # it refuses what it does not know
    dsn = overridden.server.dsn(overridden.name, user=f"u_{overridden.name}")
    if options:
        dsn = make_conninfo(dsn, options=options)
    async with kind(dsn, overridden) as connection:
        cursor = await connection.execute("SELECT name, setting FROM pg_settings")
        found = dict(await cursor.fetchall())
        status = connection.pgconn.parameter_status
        reported = {name: status(name.encode()) for name in ("TimeZone", "client_encoding")}
    wanted = {name: value for name, value in PINNED.items() if name in found}
    assert {name: found[name] for name in wanted} == wanted
    assert reported == {"TimeZone": b"UTC", "client_encoding": b"UTF8"}


@pytest.mark.parametrize("way", WAYS)
async def test_the_liveness_probe_is_answered_whatever_is_set(
    overridden: Database,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Database, pytest.MonkeyPatch], str],
) -> None:
    way(overridden, monkeypatch)
    dsn = overridden.server.dsn(overridden.name, user=f"u_{overridden.name}")
    async with (
        await connect(dsn) as connection,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
    ):
        before = await (await other.execute("SHOW IntervalStyle")).fetchone()
        for _ in range(1_000):  # when its answer arrives, it is about to wait
            if await connection.is_waiting_by(other):
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("the session does not wait")
        assert await (await other.execute("SHOW IntervalStyle")).fetchone() == before


async def test_every_connection_to_a_source_is_made_in_one_place() -> None:
    """What else connects reads no values: which session answers, and whether it lives."""
    from pathlib import Path  # noqa: PLC0415

    root = Path(__file__).parents[2]
    made = re.compile(
        r"\b(?:psycopg|AsyncConnection|Connection|LivenessCheckedConnection|LimitedConnection)\.connect\("
    )
    found = {
        str(path.relative_to(root))
        for folder in ("ingestd", "spark_jobs")
        for path in (root / folder).rglob("*.py")
        if made.search(path.read_text("utf-8")) and not {"demo", "testing"} & {*path.parts}
    }
    assert found == {
        "ingestd/postgres/connection/session.py",
        "ingestd/postgres/connection/liveness.py",
        "ingestd/postgres/connection/pooler.py",
        "ingestd/postgres/polling/server.py",
    }


# --- what can't be set -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def altering(port: int, wanted: bytes, passed_on: bytes) -> AsyncIterator[int]:
    """A proxy that replaces statements by others of the same length."""
    assert len(wanted) == len(passed_on)

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: tuple[bytes, bytes]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data.replace(*change))
                await writer.drain()
        writer.close()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pump(client, to_server, (wanted, passed_on)), pump(server, to_client, (b"", b""))
        )

    here = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", here):
        yield here


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize(
    ("name", "wanted", "passed_on", "says"),
    [
        ("TimeZone", b"UTC", b"EST", "TimeZone is 'EST', not 'UTC'"),
        ("IntervalStyle", b"iso_8601", b"postgres", "IntervalStyle is 'postgres', not 'iso_8601'"),
        ("bytea_output", b"'hex'", b"'zzz'", "bytea_output is 'refused, SQLSTATE 22023'"),
    ],
)
async def test_a_setting_that_does_not_hold_is_an_error_that_names_it(  # noqa: PLR0917
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wanted: bytes,
    passed_on: bytes,
    says: str,
    *,
    replication: bool,
) -> None:
    monkeypatch.setenv("PGTZ", "Europe/Berlin")
    async with altering(database.server.port, wanted, passed_on) as port:
        dsn = make_conninfo(database.dsn, port=port, sslmode="disable", gssencmode="disable")
        with pytest.raises(OperatorError) as caught:
            await connect(dsn, replication=replication)
    assert says in caught.value.what
    assert ("PGTZ" in caught.value.what) is (name == "TimeZone")
    assert "pooler or proxy" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("PGTZ", "Nowhere/Atall", "TimeZone"),
        ("PGDATESTYLE", "Martian", "DateStyle"),
        ("PGGEQO", "perhaps", "geqo"),
    ],
)
async def test_a_setting_the_server_rejects_is_traced_to_its_origin(
    database: Database, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OperatorError) as caught:
        await connect(database.dsn)
    assert name in caught.value.what
    assert f"environment variable {variable}" in caught.value.what
    assert f"remove {name} from environment variable {variable}" in (caught.value.remedy or "")


async def test_a_requested_client_encoding_is_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = parameters_of(database.dsn)
    monkeypatch.setattr(session, "parameters_of", lambda _: {**asked, "client_encoding": "win1252"})
    async with await connect(database.dsn) as connection:
        assert connection.pgconn.parameter_status(b"client_encoding") == b"WIN1252"


# --- a daemon --------------------------------------------------------------------------------

TABLE = """
CREATE TABLE t (id int PRIMARY KEY, a timestamptz, arr timestamptz[], r tstzrange, d date,
                i interval, b bytea, f float8)"""
ROW = """
INSERT INTO t VALUES ({}, '2024-07-01 12:00+00', '{{2024-07-01 12:00+00}}',
                      '[2024-07-01 12:00+00,2024-08-01 12:00+00)', '2024-02-03', '1 day 2:03',
                      '\\x00ff', 0.1::float8 + 0.2)"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "way",
    [
        by_environment,
        pytest.param(by_login_trigger, marks=pytest.mark.thorough),
        pytest.param(by_database, marks=pytest.mark.thorough),
    ],
)
def test_lossless_rows_are_the_same_whatever_is_set(
    overridden: Database,
    tmp_path: Path,
    lake: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Database, pytest.MonkeyPatch], str],
) -> None:
    """I7: read by the snapshot, and streamed."""
    database = overridden
    database.execute(TABLE, ROW.format(1))
    environment: Mapping[str, str] = ENVIRONMENT if way is by_environment else {}
    if way is not by_environment:
        way(database, monkeypatch)
    dsn = database.server.dsn(database.name, user=f"u_{database.name}")
    slot = f"ingestd_{database.name}"
    config = wal_config(lake=lake, dsn=dsn, source_extra=f'slot = "{slot}"\npublication = "{slot}"')
    with daemon_of(tmp_path / "daemon", config, environment) as daemon:
        daemon.await_ready(60)
        with database.connect() as writer:
            writer.execute("SET standard_conforming_strings = on")
            writer.execute("SET default_transaction_read_only = off")
            writer.execute(ROW.format(2).encode())
            await_caught_up(writer, slot)
            [compared] = compare_source(writer, str(lake), "shop", [TableId("public", "t")])
        assert compared.is_equal, compared.faults
        assert daemon.sigterm() == 0
    rows: list[dict[str, Any]] = read_raw(str(lake), "shop", TableId("public", "t")).to_pylist()
    rows = sorted((row for row in rows if row["_cdc_op"] != "t"), key=lambda row: row["id"])
    assert [row["_cdc_op"] for row in rows] == ["r", "c"]
    read, streamed = ({k: v for k, v in row.items() if not k.startswith("_cdc_")} for row in rows)
    assert [row["_cdc_raw"] or [] for row in rows] == [[], []]
    assert {**read, "id": 2} == streamed
    assert read["r"] == '["2024-07-01 12:00:00+00","2024-08-01 12:00:00+00")'
    assert read["i"] == "P1DT2H3M"


@contextlib.contextmanager
def daemon_of(folder: Path, config: str, environment: Mapping[str, str]) -> Iterator[Daemon]:
    from ingestd.testing.embedded.daemon import Daemon  # noqa: PLC0415

    daemon = Daemon(folder, config, environment=environment)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()
