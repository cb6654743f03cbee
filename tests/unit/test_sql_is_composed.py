"""SQL is literal or composed by psycopg.sql, never built as text."""

from __future__ import annotations

import pytest

from tests.harness.composed_sql import built_texts
from tests.harness.source_code import READS_CODE, modules, name_of, text_of

pytestmark = READS_CODE
MEANT = {
    ("ingestd/postgres/snapshot/where.py", "text"): "--where is SQL of whoever may run the command",
    ("ingestd/postgres/snapshot/queries.py", "table.row_filter"): "the publication's, and --where",
    ("ingestd/postgres/catalog/trusted_columns.py", "condition"): "the same; it is not run",
    (
        "ingestd/postgres/snapshot/key_lookup.py",
        "escaped",
    ): "hexadecimal digits, for bytes that are no text",
    ("ingestd/postgres/wal/publication/statements.py", "row_filter"): "as pg_get_expr writes it",
    ("ingestd/postgres/snapshot/key_range.py", "name"): "held against what operators consist of",
    (
        "ingestd/postgres/snapshot/pushdown.py",
        "kind.held or 'true'",
    ): "a LiteralString of the module",
    (
        "ingestd/postgres/snapshot/pushdown.py",
        "predicate.operator",
    ): "one of `ingestd.model.predicates.Operator`",
    (
        "ingestd/postgres/wal/replication_stream.py",
        "str(after)",
    ): "an LSN: hexadecimal digits and a slash",
    (
        "ingestd/postgres/connection/control_connection.py",
        "connection.pgconn",
    ): "a generator of psycopg's, not a statement",
    (
        "ingestd/postgres/transport/channels/libpq.py",
        r"content.removesuffix(b'\x00')",
    ): "what stream.py and copy_out.py composed, as bytes",
    (
        "ingestd/postgres/snapshot/key_splits.py",
        "query_bytes(connection, query)",
    ): "composed, as bytes",
    (
        "ingestd/postgres/polling/keys/key_pages.py",
        "query_bytes(connection, query)",
    ): "composed, as bytes",
    (
        "ingestd/postgres/connection/names.py",
        "query",
    ): "what its caller composed, in another encoding",
}
"""Arguments that are not literal, and why they may be given."""


def test_no_sql_is_built_as_text() -> None:
    found = [
        built
        for path in modules("ingestd", "spark_jobs")
        for built in built_texts(text_of(path), name_of(path))
    ]
    unmeant = [str(built) for built in found if (built.module, built.argument) not in MEANT]
    assert unmeant == []
    assert {(built.module, built.argument) for built in found} == MEANT.keys()


PRELUDE = """
from typing import LiteralString
from psycopg import sql
TABLE = "t"
QUERY = "SELECT 1 FROM {table}"
def named(name: str) -> sql.Composable: ...
def text(name: str) -> str: ...
async def f(c, name: str, query: sql.Composed, words: LiteralString, names: list[str]):
    row.name
"""


@pytest.mark.parametrize(
    "line",
    [
        "await c.execute(f'SELECT * FROM {name}')",
        "await c.execute(f'SELECT * FROM {name}'.encode())",
        "await c.execute('SELECT * FROM ' + name)",
        "await c.execute('SELECT * FROM %s' % name)",
        "await c.execute('SELECT * FROM {}'.format(name))",
        "await c.execute(QUERY.format(table=name))",
        "await c.execute(QUERY.replace('{table}', name))",
        "await c.execute('SELECT ' + ', '.join(names))",
        "await c.execute(name)",
        "await c.execute(row.name)",
        "await c.execute(text(name))",
        "await c.execute(names[0])",
        "async with c.copy(f'COPY {name} TO STDOUT'): pass",
        "sql.SQL(f'SELECT * FROM {name}').format()",
        "sql.SQL('SELECT {}').format(sql.SQL(name))",
        "made = f'SELECT {name}'\n    await c.execute(made)",
        "made = 'SELECT '\n    made += name\n    await c.execute(made)",
        "made = QUERY if name else f'SELECT {name}'\n    await c.execute(made)",
        "for made in names:\n        await c.execute(made)",
        "await c.execute(f'SELECT {name:>4}')",
        "def g(x):\n        c.execute(x)",
    ],
)
def test_a_built_text_is_seen(line: str) -> None:
    assert len(built_texts(f"{PRELUDE}    {line}\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "await c.execute('SELECT * FROM t WHERE a = %s', (name,))",
        "await c.execute(f'SELECT * FROM {TABLE}')",
        "await c.execute('SELECT * FROM ' + TABLE)",
        "await c.execute(f'TIMELINE_HISTORY {name:d}'.encode())",
        "await c.execute(sql.SQL('SELECT {}').format(sql.Identifier(name)))",
        "await c.execute(sql.SQL(QUERY).format(table=sql.Identifier(name)).as_bytes(None))",
        "await c.execute(named(name))",
        "await c.execute(query)",
        "await c.execute(words)",
        "made = sql.SQL('SELECT 1')\n    made = made + sql.SQL(', 2')\n    await c.execute(made)",
        "for made in ('SELECT 1', 'SELECT 2'):\n        await c.execute(made)",
        "made = sql.SQL(', ').join(map(sql.Identifier, names))\n    await c.execute(made)",
        "names.copy()",
    ],
)
def test_what_is_composed_is_let_be(line: str) -> None:
    assert built_texts(f"{PRELUDE}    {line}\n") == []
