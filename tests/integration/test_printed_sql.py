"""SQL and commands that are printed for pasting: printable, and they name what they name."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from ingestd.model.errors import resnapshot_command
from ingestd.model.printable_text import one_line, printable, printable_lines
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.tables import qualified
from ingestd.postgres.connection.quoting import printed

if TYPE_CHECKING:
    from tests.harness.databases import Database

NAMES = (
    "nopk\x1b[31m",
    "a\nb",
    "two  spaces ",
    "tab\t\x7f\x85\u2028",
    "back\\slash\x1b \\001B",
    "quo\"te's\x07",
    "\u202egnp\u200b",
    "emoji\U0001f600\x1b\U000e0041",
    "$(touch x)`\x1b`",
    "plain",
)


@pytest.mark.parametrize("name", NAMES)
def test_pasted_sql_names_the_table(name: str, database: Database) -> None:
    table = TableId("public", name)
    plain = sql.Identifier("public", name).as_string(None)
    database.execute(f"CREATE TABLE {plain} (id int)")
    for text in (qualified(table), printed(sql.Identifier("public", name))):
        shown = one_line(printable_lines(text))
        assert shown == text
        assert printable(text) == text
        database.execute(f"ALTER TABLE {shown} REPLICA IDENTITY FULL")
    query = printed(
        sql.SQL("SELECT {} = relname, {} FROM pg_class WHERE oid = {}::regclass").format(
            sql.Literal(name), sql.Literal(f"E' {name}"), sql.Literal(plain)
        )
    )
    assert printable(query) == query
    [(is_same, text)] = database.rows(query)
    assert is_same
    assert text == f"E' {name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_pasted_command_names_the_table(name: str) -> None:
    table = TableId("public", name)
    command = resnapshot_command("shop", table)
    assert printable(command) == command
    program = f"{sys.executable} -c 'import sys; print(ascii(sys.argv[1:]))'"
    done = subprocess.run(
        ["bash", "-c", f"{program} {command}"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONUTF8": "1"},
    )
    assert done.stdout.strip() == ascii(["ingestd", "snapshot", "shop", str(table)])
