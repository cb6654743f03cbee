"""No error of a cast contains the value: generated casts to every type of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.snapshot.where import check_condition
from tests.integration.test_pages import table_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.databases import Database

VALUES = ("Kanarienvogel", "kanari.envogel", "Kanari envogel", '{"Kanarienvogel"', "(Kanari, 1)")
T = TableId("public", "t")
OF_NAMES = {"regclass", "regproc", "regprocedure", "regoper", "regtype", "regrole", "regnamespace"}


def casts(connection: psycopg.Connection[tuple[str, str]]) -> Iterator[sql.Composed]:
    """Casts of a stored value to every type, and uses of it as a name."""
    found = connection.execute(
        "SELECT n.nspname, t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = typnamespace"
        " WHERE typtype IN ('b', 'd', 'e', 'r', 'm') AND typinput <> 0 ORDER BY 2"
    ).fetchall()
    assert {name for _, name in found} >= OF_NAMES
    for name in found:
        yield sql.SQL("SELECT note::{} FROM t").format(sql.Identifier(*name))
    for text in (
        "pg_read_file(note)",
        "nextval(note)",
        "currval(note::text)",
        "date_part(note, now())",
        "now() AT TIME ZONE note",
        "current_setting(note)",
        "has_database_privilege(note, 'connect')",
        "has_table_privilege(note, 'select')",
        "has_column_privilege('t', note, 'select')",
        "convert_to(note, note)",
        "encode('x', note)",
        "query_to_xml('select ' || quote_ident(note), true, true, '')",
        "to_tsvector(note::regconfig, '')",
        "lo_get(1234567)",
        "note::jsonb -> 'a'",
        "xpath(note, '<a/>')",
        "note ~ ('[' || note)",
        "jsonb_path_query('{}', note::jsonpath)",
    ):
        yield sql.SQL("SELECT {} FROM t").format(sql.SQL(text))


def test_no_cast_tells_the_value(database: Database) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('fine')",
        "CREATE DOMAIN short AS varchar(3) CHECK (VALUE <> 'no')",
        "CREATE TABLE t (note text)",
    )
    raised: list[tuple[sql.Composed, psycopg.Error]] = []
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        for value in VALUES:
            connection.execute("DELETE FROM t")
            connection.execute("INSERT INTO t VALUES (%s)", (value,))
            for query in casts(connection):
                try:
                    connection.execute(query)
                except psycopg.Error as error:
                    raised.append((query, error))
    for query, fault in raised:
        for told in (
            loggable_message(fault),
            str(classify(fault, "source shop", database.dsn)),
            str(read_error(fault, T, database.dsn)),
        ):
            assert "anari" not in told, (query.as_string(None), fault.sqlstate, told)
    codes = {fault.sqlstate for _, fault in raised}
    assert codes >= {"22P02", "42P01", "42883", "42704", "42602", "3F000", "58P01", "42601"}


@pytest.mark.attack("reader")
def test_messages_of_another_server_are_not_logged(database: Database) -> None:
    """dblink and postgres_fdw raise another server's message with its SQLSTATE."""
    for extension in ("dblink", "postgres_fdw"):
        if not database.rows("SELECT FROM pg_available_extensions WHERE name = %s", extension):
            pytest.skip(f"the server has no {extension}: install postgresql-contrib")
    dsn = sql.Literal(database.dsn).as_string(None)
    options = psycopg.conninfo.conninfo_to_dict(database.dsn)
    place = ", ".join(
        f"{name} {sql.Literal(str(options[name])).as_string(None)}" for name in ("host", "port")
    )
    password = Path(str(options["passfile"])).read_text().strip().rsplit(":", 1)[1]
    database.execute(
        "CREATE EXTENSION dblink",
        "CREATE EXTENSION postgres_fdw",
        """CREATE FUNCTION raises(code text) RETURNS bool LANGUAGE plpgsql AS $$
           BEGIN RAISE 'Kanarienvogel' USING errcode = code; END $$""",
        "CREATE TABLE far (code text)",
        "CREATE VIEW near AS SELECT public.raises(code) AS found FROM public.far",
        f"CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw"
        f" OPTIONS ({place}, dbname '{database.name}')",
        f"CREATE USER MAPPING FOR CURRENT_USER SERVER other"
        f" OPTIONS (user 'postgres', password '{password}')",
        "CREATE FOREIGN TABLE here (found bool) SERVER other OPTIONS (table_name 'near')",
    )
    for code in ("23514", "42501", "54000", "55000", "57014", "40001", "XX000", "08006"):
        database.execute("TRUNCATE far", f"INSERT INTO far VALUES ('{code}')")
        for query in (
            f"SELECT * FROM dblink({dsn}, 'SELECT public.raises(''{code}'')') AS t(found bool)",
            "SELECT found FROM here",
        ):
            with pytest.raises(psycopg.Error) as caught:
                database.rows(query)
            assert caught.value.sqlstate == code
            assert "Kanarien" in str(caught.value.diag.message_primary)
            assert "anari" not in loggable_message(caught.value)
            assert "anari" not in str(classify(caught.value, "source shop", database.dsn))


async def test_of_a_condition_only_the_error_code_is_reported(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (note text)",
        "INSERT INTO t VALUES ('Kanarienvogel')",
        """CREATE FUNCTION raises() RETURNS bool IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
           RAISE '%', (SELECT note FROM public.t) USING errcode = '42501'; END $$""",
    )
    table = await table_named(database, "t")
    for text in ("kanarienvogel = 1", "'kanarienvogel'::regclass IS NULL", "public.raises()", ")"):
        with pytest.raises(TableError) as caught:
            await check_condition(database.dsn, [table], text)
        assert "anari" not in str(caught.value)
        assert "SQLSTATE 42" in str(caught.value)
