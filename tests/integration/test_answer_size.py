"""What a server sends in answer to a query of a control connection is limited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.answer_size import LimitedConnection
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect

if TYPE_CHECKING:
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("server")
ENDLESS = {
    "rows": "SELECT pg_catalog.repeat('x', 500) FROM pg_catalog.generate_series(1, 1000000)",
    "empty rows": "SELECT NULL FROM pg_catalog.generate_series(1, 20000000)",
    "one row": "SELECT pg_catalog.repeat('x', 100000000)",
    "columns": "SELECT {}".format(", ".join(["pg_catalog.repeat('x', 100000)"] * 1500)),
}


async def opened(database: Database, *, is_probe: bool = False) -> LimitedConnection:
    connection = (
        await LimitedConnection.connect(database.dsn, autocommit=True)
        if is_probe
        else await connect(database.dsn)
    )
    connection.answer_limit_bytes = 16 << 20
    return connection


@pytest.mark.parametrize("query", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("is_probe", [False, True], ids=["watched", "probe"])
async def test_an_endless_answer_ends_its_connection(
    database: Database, query: str, *, is_probe: bool
) -> None:
    connection = await opened(database, is_probe=is_probe)
    with pytest.raises(psycopg.OperationalError, match="more than 16 MB") as refused:
        await connection.execute(query.encode())
    error = classify(refused.value, "source shop", database.dsn)
    assert isinstance(error, OperatorError)
    assert "include fewer tables" in str(error.remedy)
    assert "the server answered a query with more than 16 MB" in error.what
    with pytest.raises(psycopg.OperationalError):
        await connection.execute("SELECT 1")
    await connection.close()


async def test_answers_below_the_limit_add_up_to_any_size(database: Database) -> None:
    async with await opened(database) as connection:
        for _ in range(4):
            query = "SELECT repeat('x', 1000) FROM generate_series(1, 12000)"
            cursor = await connection.execute(query)
            assert len(await cursor.fetchall()) == 12000
