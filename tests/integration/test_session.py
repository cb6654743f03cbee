"""Connections, and the errors of failed ones."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.servers import running_server
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.databases import Database

SECRET = "geheim-17"


@pytest.fixture(scope="module")
def guarded(postgres_bindir: Path) -> Iterator[PostgresServer]:
    """A server that asks for passwords, with a role `plain` of no rights and one of no login."""
    with running_server(postgres_bindir, password=SECRET) as server:
        with server.connect() as connection:
            connection.execute(f"CREATE ROLE plain LOGIN PASSWORD '{SECRET}'".encode())
            connection.execute(f"CREATE ROLE sleeper PASSWORD '{SECRET}'".encode())
        yield server


async def failure(dsn: str, **options: Any) -> IngestdError:
    with pytest.raises(psycopg.Error) as caught:
        await connect(dsn, **options)
    return classify(caught.value, "source shop, connect")


@pytest.mark.parametrize("replication", [False, True])
async def test_settings_are_pinned_over_the_dsns_own(
    database: Database, *, replication: bool
) -> None:
    dsn = make_conninfo(database.dsn, options="-c DateStyle=German -c work_mem=5MB")
    names = "DateStyle TimeZone IntervalStyle extra_float_digits bytea_output client_encoding"
    found = {}
    async with await connect(dsn, replication=replication) as connection:
        for name in [*names.split(), "work_mem", "application_name"]:
            row = await (await connection.execute(f"SHOW {name}".encode())).fetchone()
            assert row is not None
            found[name] = row[0]
    assert found.pop("DateStyle").startswith("ISO,")
    assert found == {
        "TimeZone": "UTC", "IntervalStyle": "iso_8601", "extra_float_digits": "3",
        "bytea_output": "hex", "client_encoding": "UTF8", "work_mem": "5MB",
        "application_name": "ingestd (stream)" if replication else "ingestd",
    }  # fmt: skip


CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "password": ({"password": "wrong"}, "password authentication failed", "ALTER ROLE"),
    "database": ({"dbname": "nowhere"}, "does not exist", 'CREATE DATABASE "nowhere"'),
    "login": ({"user": "sleeper"}, "not permitted to log in", 'ALTER ROLE "sleeper" LOGIN'),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
async def test_what_a_person_must_put_right(guarded: PostgresServer, case: str) -> None:
    change, said, remedy = CASES[case]
    error = await failure(make_conninfo(guarded.dsn(), **change))
    assert isinstance(error, OperatorError)
    assert said in error.what
    assert remedy in (error.remedy or "")
    assert f"host 127.0.0.1, port {guarded.port}" in error.what
    assert SECRET not in str(error)


ODD = 'no"body \x07 {role}'


def pasted(remedy: str, verb: str, password: str, attributes: str = "") -> str:
    """The statement of a remedy that begins so, with a password, as a user runs it."""
    statement = re.search(rf"{verb} [^;]*;", remedy)
    assert statement is not None, remedy
    return statement[0].replace("LOGIN", f"LOGIN {attributes}").replace("'...'", f"'{password}'")


@pytest.mark.parametrize("replication", [False, True])
async def test_the_remedy_for_a_role_can_be_pasted(
    guarded: PostgresServer, *, replication: bool
) -> None:
    """For an unknown role and a wrong password: the server's answer is the same."""
    name = f"{ODD} {replication}"
    dsn = make_conninfo(guarded.dsn(), user=name, password=SECRET)
    attributes = "REPLICATION" if replication else ""
    error = await failure(dsn, replication=replication)
    assert "role" in (error.remedy or "").partition("in `dsn`")[0]
    told = error.remedy or ""
    with guarded.connect() as connection:
        with pytest.raises(psycopg.errors.UndefinedObject):
            connection.execute(pasted(told, "ALTER ROLE", SECRET).encode())
        connection.execute(pasted(told, "CREATE ROLE", "another", attributes).encode())
        error = await failure(dsn, replication=replication)
        assert error.remedy == told
        connection.execute(pasted(told, "ALTER ROLE", SECRET).encode())
    async with await connect(dsn, replication=replication):
        pass


async def test_a_role_without_replication_is_refused_with_a_remedy(guarded: PostgresServer) -> None:
    dsn = make_conninfo(guarded.dsn(), user="plain")
    async with await connect(dsn):
        pass
    error = await failure(dsn, replication=True)
    assert isinstance(error, OperatorError)
    assert 'ALTER ROLE "plain" REPLICATION' in (error.remedy or "")


async def test_an_unreachable_server_is_transient(guarded: PostgresServer) -> None:
    error = await failure(make_conninfo(guarded.dsn(), port=free_port()))
    assert isinstance(error, TransientError)
    assert error.reason == "unreachable"
    assert SECRET not in str(error)


async def test_a_name_that_does_not_resolve_is_transient() -> None:
    error = await failure(f"host=nowhere.invalid user=u dbname=d password={SECRET}")
    assert isinstance(error, TransientError)
    assert error.reason == "unreachable"


async def test_an_ended_session_is_transient(database: Database) -> None:
    connection = await connect(database.dsn)
    with pytest.raises(psycopg.Error) as ended:
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(psycopg.Error) as closed:
        await connection.execute("SELECT 1")
    reasons = [
        error.reason
        for error in (classify(e.value, "x", database.dsn) for e in (ended, closed))
        if isinstance(error, TransientError)
    ]
    assert reasons == ["server_restarting", "connection_lost"]


async def test_limits_of_time_are_transient(database: Database) -> None:
    database.execute("CREATE TABLE t ()")
    async with await connect(
        database.dsn, statement_timeout_s=0.2, lock_timeout_s=0.05
    ) as connection:
        with pytest.raises(psycopg.Error) as slow:
            await connection.execute("SELECT pg_sleep(30)")
        with database.connect(autocommit=False) as holder:
            holder.execute("LOCK t")
            with pytest.raises(psycopg.Error) as locked:
                await connection.execute("SELECT FROM public.t")
    errors = [classify(e.value, "x") for e in (slow, locked)]
    assert [e.reason for e in errors if isinstance(e, TransientError)] == [
        "timeout",
        "lock_timeout",
    ]


async def test_a_full_server_is_transient(database: Database) -> None:
    user = f"u_{database.name}"
    database.execute(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 1")
    dsn = database.server.dsn(database.name, user=user)
    try:
        async with await connect(dsn):
            error = await failure(dsn)
    finally:
        database.execute(f"DROP ROLE {user}")
    assert isinstance(error, TransientError)
    assert error.reason == "too_many_connections"


async def test_an_unknown_error_is_never_guessed(database: Database) -> None:
    async with await connect(database.dsn) as connection:
        with pytest.raises(psycopg.Error) as caught:
            await connection.execute("SELECT 1 / 0")
    error = classify(caught.value, "source shop, test", database.dsn)
    assert type(error) is OperatorError
    assert error.what.startswith("source shop, test: DivisionByZero, SQLSTATE 22012 (")
    assert "(host 127.0.0.1" in error.what


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{SECRET}@x@127.0.0.1/db",
        f"postgresql://me:{SECRET}/x@127.0.0.1/db",
        f"not a dsn {SECRET}",
        f"host=127.0.0.1 port={SECRET}",
    ],
)
async def test_a_dsn_that_cannot_be_read_is_never_shown(dsn: str) -> None:
    with pytest.raises(OperatorError) as caught:
        await connect(dsn)
    shown: BaseException | None = caught.value
    while shown is not None:
        assert SECRET not in str(shown)
        shown = shown.__cause__ or shown.__context__


def test_a_good_dsn_is_read() -> None:
    assert read_dsn("postgresql://me:a%40b@h1,h2:5432/d?connect_timeout=3") == {
        "user": "me", "password": "a@b", "host": "h1,h2", "port": ",5432", "dbname": "d",
        "connect_timeout": "3",
    }  # fmt: skip


@pytest.mark.parametrize("replication", [False, True])
async def test_what_is_cancelled_leaves_no_session(
    database: Database, *, replication: bool
) -> None:
    """At any instant of a session, whatever refers to the exception: a stop, a timeout, a retry."""

    async def attempt() -> None:
        try:
            async with await connect(
                database.dsn, replication=replication, autocommit=replication
            ) as connection:
                await connection.execute("SHOW port")
        except asyncio.CancelledError as error:
            held = error  # refers to this frame, which refers to it
            raise held from None

    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    gc.collect()
    gc.disable()
    try:
        with psycopg.connect(database.dsn, autocommit=True) as observer:

            def is_alone() -> bool:
                return observer.execute(others).fetchone() == (1,)

            for step in range(80):
                attempting = asyncio.create_task(attempt())
                await asyncio.sleep(step * 0.0004)
                attempting.cancel()
                await asyncio.wait({attempting})
                await_until(is_alone, 10, f"the end of session {step}")
    finally:
        gc.enable()
