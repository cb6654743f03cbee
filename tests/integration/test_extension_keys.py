"""Keys of types that extensions make: found by the operators of their own schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from psycopg import sql

from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.key_order import key_order
from ingestd.postgres.snapshot.key_lookup import KeyedRelation, KeyList
from tests.harness.command_line import await_verified
from tests.harness.config import polling_config, wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
KEYS = {
    "citext": "CASE WHEN i % 2 = 0 THEN 'Key' ELSE 'key' END || i",
    "ltree": "'top.k' || i",
    "hstore": "'a=>' || i",
    "isbn": "isbn(('0-' || lpad(i::text, 8, '0') || '-?')::text)::text",
}
"""By type, the text of its i-th value."""
EXTENSIONS = {"isbn": "isn"}
"""Whose name is not the type's."""


@pytest.mark.parametrize("name", KEYS)
async def test_keys_are_compared_by_the_operators_of_their_extension(
    database: Database, name: str
) -> None:
    """In lists, and in the order of an index whose columns have two directions."""
    extension = EXTENSIONS.get(name, name)
    if not database.rows("SELECT FROM pg_available_extensions WHERE name = %s", extension):
        pytest.skip(f"the server has no {extension}: install postgresql-contrib")
    database.execute(
        f"CREATE EXTENSION {extension}",
        f"CREATE DOMAIN below AS {name}",
        "CREATE DOMAIN d AS below",
        f"CREATE TABLE t (k {name} NOT NULL, i d NOT NULL)",
        "CREATE UNIQUE INDEX ON t (k DESC, i)",
        f"INSERT INTO t SELECT ({KEYS[name]})::{name}, ({KEYS[name]})::{name}"
        " FROM generate_series(1, 9) i",
    )
    columns = tuple(
        Column(
            c,
            int(
                database.value(
                    "SELECT atttypid::int8 FROM pg_attribute"
                    " WHERE attrelid = 't'::regclass AND attname = %s",
                    c,
                )
            ),
            -1,
            pa.string(),
            identity=True,
        )
        for c in "ki"
    )
    oid = int(database.value("SELECT 't'::regclass::int8"))
    table = Table(TableId("public", "t"), oid, columns, "i", ("k", "i"))
    keys = [(k, i) for k, i in database.rows("SELECT k::text, i::text FROM t ORDER BY t.k DESC")]
    async with await connect(database.dsn) as connection:
        keyed = await KeyedRelation.find(connection, table, table.key)
        order = await key_order(connection, table, keyed.types)
        listed = KeyList(table, keyed, tuple(keys[3:6]))
        after = order.after([sql.Literal(text) for text in keys[4]])
        counts = []
        for condition in (*listed.bounds, sql.SQL(" OR ").join(after)):
            query = sql.SQL("SELECT count(*)::int FROM public.t WHERE {}").format(condition)
            counts += [count for (count,) in await (await connection.execute(query)).fetchall()]
    assert order.is_indexed
    assert counts == [3, 4]


@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_rows_are_found_by_keys_of_extension_types(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    available = {name for (name,) in database.rows("SELECT name FROM pg_available_extensions")}
    found = [name for name in KEYS if EXTENSIONS.get(name, name) in available]
    if not found:
        pytest.skip("the server has none of these extensions: install postgresql-contrib")
    for name in found:
        database.execute(
            f"CREATE EXTENSION {EXTENSIONS.get(name, name)}",
            f"CREATE DOMAIN {name}_domain AS {name}",
            f"CREATE TABLE {name}_one (k {name} PRIMARY KEY, n int, big text)",
            f"CREATE TABLE {name}_two (k {name}_domain, i int, n int, big text,"
            f" PRIMARY KEY (i, k))",
            f"CREATE TABLE {name}_down (k {name}, i int, n int, big text)",
            f"CREATE UNIQUE INDEX ON {name}_down (k DESC, i)",
            f"ALTER TABLE {name}_down ALTER k SET NOT NULL, ALTER i SET NOT NULL",
        )
    tables = [f"{name}_{form}" for name in found for form in ("one", "two", "down")]

    def value(table: str) -> str:
        name, form = table.split("_")
        return f"({KEYS[name]})::{name}{'' if form == 'one' else ', i % 7'}"

    for table in tables:
        columns = "k, n, big" if table.endswith("one") else "k, i, n, big"
        database.execute(
            f"ALTER TABLE {table} ALTER big SET STORAGE EXTERNAL",
            f"INSERT INTO {table} ({columns}) SELECT {value(table)}, 0, repeat('x', 3000)"
            " FROM generate_series(1, 400) i",
        )
    if kind == "wal":
        slot = f"ingestd_{database.name}"
        extra = f'slot = "{slot}"\npublication = "{slot}"\nsnapshot_chunked_above = 0'
        for name in found:
            database.execute(
                f"ALTER TABLE {name}_down REPLICA IDENTITY USING INDEX {name}_down_k_i_idx"
            )
        config = wal_config(lake=lake, dsn=database.dsn, source_extra=extra)
    else:
        section = '[sources.shop.table."public.{}_down"]\nkey = ["k", "i"]\n'
        extra = "".join(map(section.format, found))
        config = polling_config(lake=lake, dsn=database.dsn, extra=extra)
    daemon = make_daemon(config)
    daemon.start_ready(LIMIT_S)
    for table in tables:
        database.execute(
            f"UPDATE {table} SET n = n + 1 WHERE n = 0 AND k::text LIKE '%1%'",
            f"DELETE FROM {table} WHERE k::text LIKE '%5%'",
        )
    await_verified(daemon, LIMIT_S)
    assert not daemon.events("table.stopped")
