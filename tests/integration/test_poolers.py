"""Connections through a pooler: in session mode as without, in transaction mode refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import psycopg
import pytest

from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.postgres.connection.pinned_settings import SETTINGS
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.server import detect_transaction_pooler
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.config import polling_config
from tests.harness.poolers import pooler_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 20.0
WITH_OPTIONS = "extra_float_digits,options"
"""What many a pooler's config has it ignore: the settings get lost without a word."""


@pytest.mark.parametrize("ignored", ["extra_float_digits", WITH_OPTIONS])
async def test_settings_are_pinned_through_a_pooler_in_session_mode(
    database: Database, ignored: str
) -> None:
    with pooler_of(database, "session", ignored=ignored) as pooler:
        await detect_transaction_pooler(pooler.dsn)
        async with (
            await connect(pooler.dsn, statement_timeout_s=7) as through,
            await connect(database.dsn, statement_timeout_s=7) as direct,
        ):
            for name in (*SETTINGS, "statement_timeout", "lock_timeout", "idle_session_timeout"):
                shown = [
                    await (await c.execute(f"SHOW {name}".encode())).fetchone()
                    for c in (through, direct)
                ]
                assert shown[0] == shown[1], name


@pytest.mark.parametrize("ignored", ["extra_float_digits", WITH_OPTIONS])
@pytest.mark.parametrize("mode", ["transaction", "statement"])
async def test_a_pooler_that_shares_sessions_is_refused(
    database: Database, mode: Literal["transaction", "statement"], ignored: str
) -> None:
    with pooler_of(database, mode, ignored=ignored, pool_size=1) as pooler:
        for attempt in (detect_transaction_pooler, connect):
            with pytest.raises(OperatorError) as caught:
                await attempt(pooler.dsn)
            assert "transaction (or statement) mode" in caught.value.what
            assert "pool_mode = session" in (caught.value.remedy or "")
        async with await psycopg.AsyncConnection.connect(pooler.dsn, autocommit=True) as other:
            for name, value in (("row_security", "on"), ("IntervalStyle", "postgres")):
                assert await (await other.execute(f"SHOW {name}")).fetchone() == (value,)
    with pooler_of(database, mode, ignored=ignored) as pooler, pytest.raises(OperatorError):
        await detect_transaction_pooler(pooler.dsn)


async def test_a_session_pool_with_one_session_left_is_no_fault(database: Database) -> None:
    with pooler_of(database, "session", pool_size=1) as pooler:
        await detect_transaction_pooler(pooler.dsn)
        async with await connect(pooler.dsn) as connection:
            await connection.execute("SELECT")


def test_a_daemon_polls_through_a_pooler_in_session_mode(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())",
        "CREATE INDEX ON item (at)",
        "INSERT INTO item SELECT generate_series(1, 10)",
    )
    extra = '[sources.shop.table."public.item"]\ncursor = "at"\ndetect_deletes = "200ms"\n'
    with pooler_of(database, "session") as pooler:
        daemon = make_daemon(polling_config(lake=lake, dsn=pooler.dsn, extra=extra))
        daemon.start_ready()
        database.execute("INSERT INTO item VALUES (11)", "DELETE FROM item WHERE id = 3")

        def is_equal() -> bool:
            with database.connect() as connection:
                found = compare_source(connection, str(lake), "shop", [TableId("public", "item")])
            return bool(found) and all(c.is_equal for c in found)

        await_until(is_equal, LIMIT_S, lambda: f"the lake to equal the source\n{daemon.tail()}")
        assert daemon.sigterm() == 0


def test_a_pooler_in_transaction_mode_is_reported_by_the_daemon(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    with pooler_of(database, "transaction") as pooler:
        daemon = make_daemon(polling_config(lake=lake, dsn=pooler.dsn))
        daemon.start()
        failed = await_until(lambda: daemon.events("source.failed"), LIMIT_S, "the source to fail")
        assert "transaction (or statement) mode" in failed[0]["reason"]
        assert "pool_mode = session" in failed[0]["remedy"]
