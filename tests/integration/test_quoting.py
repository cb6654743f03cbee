"""Literals composed without a connection mean their text, whatever this process connected to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

import ingestd.postgres.connection.quoting  # noqa: F401 - what has it so
from tests.integration.test_round_trip_encodings import recreate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from tests.harness.databases import Database

TEXTS = st.text(st.sampled_from("aあ語é'\\\"$%{}; \N{PILE OF POO}\n"), max_size=8)


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection]:
    """One of UTF-8; the one made last, which libpq remembers, is of EUC_JP and of old strings."""
    recreate(database, "EUC_JP")
    with database.server.connect() as connection, database.connect() as last:
        last.execute("SET client_encoding TO 'EUC_JP'")
        last.execute("SET standard_conforming_strings TO off")
        yield connection


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_a_literal_is_its_text(connection: psycopg.Connection, conforming: str) -> None:
    connection.execute(f"SET standard_conforming_strings TO {conforming}")

    @settings(max_examples=200)
    @given(st.lists(TEXTS, min_size=1, max_size=3))
    def check(texts: list[str]) -> None:
        one, several = sql.Literal(texts[0]), sql.Literal(texts)
        query = sql.SQL("SELECT {}::text, {}::text[]").format(one, several).as_string(None)
        assert connection.execute(query.encode()).fetchone() == (texts[0], texts)

    check()
