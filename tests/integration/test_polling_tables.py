"""Which tables are polled, what happened to them, and the output of `check`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.decode.type_mapping import lake_type
from ingestd.model.lake_state import RegisteredTable, TableEvent, TableState, registered
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.connector import PollingFactory
from ingestd.postgres.polling.discovery import PolledTables
from ingestd.postgres.polling.polled_table import Cursor
from ingestd.postgres.polling.preflight import preflight
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from ingestd.postgres.polling.server import inspect_polled_server
from ingestd.postgres.settings import PollingSettings
from tests.harness.poolers import pooler_of
from tests.harness.standbys import await_replayed, copy_of, promote, server_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ingestd.model.check import CheckLine
    from ingestd.model.schema import Table
    from ingestd.ports import Discovery
    from tests.harness.databases import Database

T = TableId("public", "t")
AT = datetime(2026, 1, 1, tzinfo=UTC)
WHOLE = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), note text)"


def settings(dsn: str, table: Mapping[str, Any] | None = None, **changes: Any) -> PollingSettings:
    """`table`: the section of table public.t."""
    named: dict[str, Any] = {"dsn": dsn, "tables": ["public.*"], "mask_key": "key"}
    if table is not None:
        named["table"] = {"public.t": dict(table)}
    return PollingSettings.model_validate({"kind": "polling", **named, **changes})


async def discover(
    tables: PolledTables, dsn: str, known: Mapping[TableId, RegisteredTable] | None = None
) -> Discovery:
    async with await connect(dsn) as connection:
        return await tables.discover(connection, known or {})


async def look(
    dsn: str, table: Mapping[str, Any] | None = None, **changes: Any
) -> tuple[PolledTables, Discovery]:
    tables = PolledTables(settings(dsn, table, **changes))
    return tables, await discover(tables, dsn)


SOMEWHERE = PollProgress(SeenXids(3), SeenXids(3)).to_text()


def recorded(tables: Iterable[Table], resume: str = SOMEWHERE) -> dict[TableId, RegisteredTable]:
    """What the lake has of these, live."""
    events = [TableEvent(table, TableState.LIVE, AT, Lsn(1)) for table in tables]
    return {e.table.id: replace(registered(e, None), resume=resume) for e in events}


# --- what a table is -------------------------------------------------------------------------


async def test_a_table_is_described_with_its_key_for_identity(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (b int, amount numeric(12,2), a int, twice int GENERATED ALWAYS AS (a * 2)"
        " STORED, note text, PRIMARY KEY (a, b) INCLUDE (note))",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    )
    tables, found = await look(database.dsn)
    [table] = found.tables
    assert (table.id, table.key, table.identity, table.before) == (
        T,
        ("a", "b"),
        ("b", "a"),
        ("b", "a"),
    )
    assert table.replica_identity == "d"
    assert [c.name for c in table.columns] == ["b", "amount", "a", "twice", "note"]
    assert [c.type for c in table.columns[:2]] == [
        lake_type(23, -1),
        lake_type(1700, (12 << 16) + 2 + 4),
    ]
    polled = tables.polled(T)
    assert polled.table == table
    assert (polled.cursor, polled.deleted, polled.interval_s, polled.sweep_s) == (
        None,
        None,
        10.0,
        None,
    )
    with pytest.raises(KeyError):
        tables.polled(TableId("public", "other"))


async def test_virtual_columns_are_captured_where_the_server_has_them() -> None:
    with server_of(18) as server, server.connect() as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (2))")
        _, found = await look(server.dsn())
        [table] = found.tables
        assert [c.name for c in table.columns] == ["id", "twice"]


async def test_the_config_says_how_a_table_is_polled(database: Database) -> None:
    database.execute(
        "CREATE DOMAIN moment AS timestamptz",
        "CREATE TABLE t (id int NOT NULL, shop int NOT NULL, at moment, gone boolean, email text)",
        "CREATE UNIQUE INDEX ON t (id, shop)",
    )
    tables, found = await look(
        database.dsn,
        {
            "cursor": ["at", "id"],
            "key": ["shop", "id"],
            "detect_deletes": "1h",
            "deleted": "gone",
            "interval": "1m",
            "exclude_columns": ["at", "gone"],
            "mask_columns": {"email": "sha256"},
        },
    )
    assert found.refused == ()
    polled = tables.polled(T)
    assert polled.table.key == ("shop", "id")
    assert [c.name for c in polled.table.columns] == ["id", "shop", "email"]
    assert polled.cursor == Cursor(("at", "id"), "time")
    assert (polled.deleted, polled.interval_s, polled.sweep_s) == ("gone", 60.0, 3600.0)


@pytest.mark.parametrize(
    ("type_name", "kind"),
    [
        ("timestamp(3)", "time"),
        ("timestamptz", "time"),
        ("date", "time"),
        ("smallint", "number"),
        ("integer", "number"),
        ("bigint", "number"),
        ("numeric(20)", "number"),
        ("uuid", "uuid"),
    ],
)
async def test_cursors(database: Database, type_name: str, kind: str) -> None:
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, c {type_name})")
    tables, _ = await look(database.dsn, {"cursor": "c"})
    assert tables.polled(T).cursor == Cursor(("c",), kind)  # type: ignore[arg-type]


NO_KEY = "CREATE TABLE t (id int NOT NULL, a int, at timestamptz)"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("made", "table", "reason", "remedy"),
    [
        ([NO_KEY], {}, "no primary key", 'ALTER TABLE "public"."t" ADD PRIMARY KEY'),
        (
            [NO_KEY, "CREATE UNIQUE INDEX ix ON t (id)"],
            {},
            "no primary key; the unique index ix could serve",
            'set table."public.t".key = ["id"]',
        ),
        (
            [NO_KEY, "CREATE UNIQUE INDEX ON t (id) WHERE a > 0"],
            {"key": ["id"]},
            "no unique index has exactly the columns of the key (id), and all rows",
            'CREATE UNIQUE INDEX CONCURRENTLY ON "public"."t" ("id");',
        ),
        (
            [NO_KEY, "CREATE UNIQUE INDEX ON t (id, abs(id))"],
            {"key": ["id"]},
            "no unique index has exactly",
            "CREATE UNIQUE INDEX",
        ),
        ([NO_KEY, "CREATE INDEX ON t (id)"], {"key": ["id"]}, "no unique index has exactly", ""),
        (
            [NO_KEY, "CREATE UNIQUE INDEX ON t (a)"],
            {"key": ["a"]},
            "column 'a' of the key may be null",
            'ALTER TABLE "public"."t" ALTER COLUMN "a" SET NOT NULL;',
        ),
        ([WHOLE], {"key": ["idd"]}, "no column 'idd', which 'key' names", "did you mean 'id'?"),
        ([WHOLE], {"cursor": "att"}, "no column 'att', which 'cursor'", "did you mean 'at'?"),
        ([WHOLE], {"deleted": "gone"}, "no column 'gone', which 'deleted' names", "correct table"),
        (
            [WHOLE],
            {"cursor": "note"},
            "column 'note' text can't be a cursor: possible types are timestamp",
            'name another in table."public.t".cursor',
        ),
        (
            ["CREATE TABLE t (id int PRIMARY KEY, j json)"],
            {"cursor": "j"},
            "column 'j' json can't be a cursor",
            "",
        ),
        (
            ["CREATE TABLE t (id int PRIMARY KEY, p point)"],
            {"cursor": "p"},
            "column 'p' point can't be a cursor",
            "",
        ),
        (
            [WHOLE],
            {"exclude_columns": ["id"]},
            "column 'id' belongs to the key, which identifies the rows of changes: it can't be",
            "remove it from",
        ),
        (
            [WHOLE],
            {"mask_columns": {"id": "null"}},
            "column 'id' belongs to the key, which identifies the rows of changes: it can't be",
            "use sha256",
        ),
        (
            [WHOLE],
            {"exclude_columns": ["nota"]},
            "column 'nota' in exclude_columns does not exist",
            "did you mean 'note'?",
        ),
        (
            [WHOLE, "ALTER TABLE t SET UNLOGGED"],
            {},
            "an unlogged table writes no WAL, and a crash empties it",
            "SET LOGGED",
        ),
    ],
)
async def test_what_can_not_be_polled_is_refused_alone(
    database: Database, made: list[str], table: dict[str, Any], reason: str, remedy: str
) -> None:
    database.execute(*made, "CREATE TABLE good (id int PRIMARY KEY)")
    _, found = await look(database.dsn, table)
    [refused] = found.refused
    assert refused.table.id == T
    assert refused.error.reason.startswith(reason)
    assert remedy in (refused.error.remedy or "")
    assert [t.id.name for t in found.tables] == ["good"]


async def test_a_deferrable_key_serves(database: Database) -> None:
    database.execute("CREATE TABLE t (id int, PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED)")
    tables, _ = await look(database.dsn)
    assert tables.polled(T).table.identity == ("id",)


async def test_a_role_needs_select_and_nothing_more(database: Database, stranger: str) -> None:
    database.execute(
        WHOLE,
        "CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE TABLE hidden (id int PRIMARY KEY)",
        "ALTER TABLE hidden ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON hidden USING (id > 1)",
        f"GRANT SELECT ON t, hidden TO {stranger}",
        "INSERT INTO t VALUES (1)",
    )
    dsn = database.server.dsn(database.name, user=stranger)
    tables, found = await look(dsn)
    assert [t.id for t in found.tables] == [T]
    remedies = {r.table.id.name: r.error.remedy for r in found.refused}
    assert remedies == {
        "other": f'GRANT SELECT ON "public"."other" TO "{stranger}";',
        "hidden": f'ALTER ROLE "{stranger}" BYPASSRLS;  (as a superuser)',
    }
    database.execute("TRUNCATE t")
    found = await discover(tables, dsn, recorded(found.tables))
    assert found.rewritten == {T: "truncated"}
    levels = {line.level for line in await check(dsn) if line.subject == "table public.t"}
    assert levels == {"ok"}


# --- what has become of it -------------------------------------------------------------------


FILLED = (WHOLE, "INSERT INTO t SELECT n, now(), 'x' FROM generate_series(1, 100) n")


@pytest.mark.thorough
@pytest.mark.parametrize("runs_on", [True, False])
@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (["TRUNCATE t"], "truncated"),
        (["TRUNCATE t", "INSERT INTO t VALUES (1)", "ANALYZE t"], "truncated"),
        (["TRUNCATE t", "INSERT INTO t VALUES (1)", "VACUUM FULL t"], "truncated"),
        (["TRUNCATE t", "INSERT INTO t VALUES (1)", "GRANT SELECT ON t TO PUBLIC"], "truncated"),
        (["VACUUM FULL t"], None),
        (["CLUSTER t USING t_pkey"], None),
        (["DELETE FROM t WHERE id > 1", "VACUUM (FULL, FREEZE) t", "ANALYZE t"], None),
        (["UPDATE t SET note = 'y' WHERE id > 1", "VACUUM FULL t"], None),
        (["ALTER TABLE t ALTER id TYPE bigint"], "rewritten by ALTER TABLE"),
        (["ALTER TABLE t RENAME note TO remark"], "a column was renamed"),
        (["INSERT INTO t VALUES (0)", "ANALYZE t", "CREATE INDEX ON t (at)"], None),
    ],
)
async def test_a_truncate_is_reported_once(
    database: Database,
    statements: list[str],
    reason: str | None,
    runs_on: bool,  # noqa: FBT001
) -> None:
    database.execute(*FILLED)
    tables, found = await look(database.dsn)
    known = recorded(found.tables)
    database.execute(*statements)
    assert await tables.have_changed()
    if not runs_on:
        tables = PolledTables(settings(database.dsn))
    found = await discover(tables, database.dsn, known)
    assert found.rewritten == ({} if reason is None else {T: reason})
    assert not found.interrupted
    assert not await tables.have_changed()
    # It is in what is recorded now; without that, in what the run knows.
    after = recorded(found.tables) if not runs_on else known
    again = tables if runs_on else PolledTables(settings(database.dsn))
    assert (await discover(again, database.dsn, after)).rewritten == {}


async def test_a_truncate_after_a_vacuum_full_is_reported(database: Database) -> None:
    database.execute(*FILLED)
    _, found = await look(database.dsn)
    known = recorded(found.tables)
    database.execute("VACUUM FULL t", "UPDATE t SET note = 'y'")
    tables = PolledTables(settings(database.dsn))
    found = await discover(tables, database.dsn, known)
    [table] = found.tables
    assert table.fingerprint != known[T].fingerprint
    known = recorded(found.tables)
    database.execute("TRUNCATE t", "INSERT INTO t VALUES (1)", "VACUUM FULL t")
    found = await discover(PolledTables(settings(database.dsn)), database.dsn, known)
    assert found.rewritten == {T: "truncated"}


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("TRUNCATE t", "a partition was truncated directly"),
        ("TRUNCATE t_1", "a partition was truncated directly"),
        ("VACUUM FULL t_1", None),
        ("ALTER TABLE t DETACH PARTITION t_1", "a partition was detached or dropped"),
        ("ALTER TABLE t ATTACH PARTITION old FOR VALUES IN (3)", "a partition was added with"),
        ("CREATE TABLE t_4 PARTITION OF t FOR VALUES IN (4)", None),
    ],
)
async def test_partitions_that_come_and_go(
    database: Database, statement: str, reason: str | None
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2)",
        "INSERT INTO t VALUES (1), (2)",
        "CREATE TABLE old (id int PRIMARY KEY)",
        "INSERT INTO old VALUES (3)",
    )
    tables, found = await look(database.dsn, tables=["public.t"])
    database.execute(statement)
    found = await discover(tables, database.dsn, recorded(found.tables))
    if reason is None:
        assert found.rewritten == {}
    else:
        assert found.rewritten[T].startswith(reason)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (["CREATE TABLE t_4 PARTITION OF t FOR VALUES IN (4)"], None),
        (["TRUNCATE t_1"], "a partition was truncated directly"),
        (["ALTER TABLE t ATTACH PARTITION old FOR VALUES IN (3)"], "a partition was added with"),
    ],
)
async def test_partitions_that_the_role_may_read_only_as_a_whole(
    database: Database, stranger: str, statements: list[str], reason: str | None
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY LIST (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1)",
        "INSERT INTO t VALUES (1, 'x')",
        "CREATE TABLE old (id int PRIMARY KEY, note text)",
        "INSERT INTO old VALUES (3, 'y')",
        f"GRANT SELECT ON t TO {stranger}",
    )
    dsn = database.server.dsn(database.name, user=stranger)
    tables, found = await look(dsn, tables=["public.t"])
    database.execute(*statements)
    rewritten = (await discover(tables, dsn, recorded(found.tables))).rewritten
    if reason is None:
        assert rewritten == {}
    else:
        assert rewritten[T].startswith(reason)


async def test_a_live_table_without_a_polling_position_has_one_gap(
    database: Database,
) -> None:
    database.execute(WHOLE)
    _, found = await look(database.dsn)
    known = recorded(found.tables, resume="")
    tables = PolledTables(settings(database.dsn))
    assert (await discover(tables, database.dsn, known)).interrupted.keys() == {T}
    # As known to a run that has re-read the table.
    assert (await discover(tables, database.dsn, known)).interrupted == {}


async def test_another_key_or_a_column_that_was_left_out_is_a_gap(database: Database) -> None:
    database.execute(
        WHOLE, "ALTER TABLE t ADD code int NOT NULL", "CREATE UNIQUE INDEX ON t (code)"
    )
    _, found = await look(database.dsn)
    known = recorded(found.tables)
    tables = PolledTables(settings(database.dsn, {"key": ["code"]}))
    assert (await discover(tables, database.dsn, known)).interrupted.keys() == {T}
    _, found = await look(database.dsn, {"exclude_columns": ["note"]})
    tables = PolledTables(settings(database.dsn))
    known = recorded(found.tables)
    assert (await discover(tables, database.dsn, known)).interrupted.keys() == {T}
    database.execute("ALTER TABLE t ADD fresh int")
    tables, found = await look(database.dsn)
    known = recorded(found.tables)
    assert (await discover(tables, database.dsn, known)).interrupted == {}


async def test_a_key_that_is_unique_no_more_is_noticed(database: Database) -> None:
    database.execute(NO_KEY, "CREATE UNIQUE INDEX ix ON t (id)")
    tables, found = await look(database.dsn, {"key": ["id"]})
    assert len(found.tables) == 1
    assert not await tables.have_changed()
    database.execute("DROP INDEX ix")
    assert await tables.have_changed()
    found = await discover(tables, database.dsn, recorded(found.tables))
    assert [r.table.id for r in found.refused] == [T]
    with pytest.raises(KeyError):
        tables.polled(T)


# --- the server ------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_a_standby_is_polled_and_has_the_primarys_origin() -> None:
    with server_of(15) as primary, primary.connect() as connection:
        for statement in (*FILLED, "CREATE ROLE reader LOGIN", "GRANT SELECT ON t TO reader"):
            connection.execute(statement.encode())
        primary.share_password()
        with copy_of(primary) as standby:
            await_replayed(primary, standby)
            dsn = standby.dsn(user="reader")
            tables, found = await look(dsn)
            assert [t.id for t in found.tables] == [T]
            _, on_primary = await look(primary.dsn())
            assert found.server_id == on_primary.server_id
            connection.execute("TRUNCATE t")
            await_replayed(primary, standby)
            found = await discover(tables, dsn, recorded(found.tables))
            assert found.rewritten == {T: "truncated"}
            lines = {line.subject: line for line in await check(dsn, listen="changes")}
            assert lines["server"].detail.endswith(", a standby")
            assert lines["standby"].level == "warn"
            assert "hot_standby_feedback = on" in (lines["standby"].remedy or "")
            assert (lines["listen"].level, lines["listen"].detail) == (
                "fail",
                "a standby does not support LISTEN",
            )
            before = found.server_id
            promote(standby)
            _, found = await look(dsn)
            assert found.server_id.partition("/")[0] == before.partition("/")[0]
            assert found.server_id != before


async def test_an_old_server_is_a_fault(database: Database) -> None:
    async with await connect(database.dsn) as connection:
        server = await inspect_polled_server(connection)
    assert server.faults() == []
    [fault] = replace(server, version=130010, version_text="13.10").faults()
    assert "13.10 is too old" in fault.what
    assert abs((server.clock - datetime.now(UTC)).total_seconds()) < 60


# --- check -----------------------------------------------------------------------------------


async def check(
    dsn: str, table: Mapping[str, Any] | None = None, **changes: Any
) -> list[CheckLine]:
    connector = PollingFactory().create(
        "shop", settings(dsn, table, **changes), memory_bytes=1 << 20
    )
    return list(await connector.check())


def by_subject(lines: list[CheckLine], subject: str) -> CheckLine:
    [line] = [line for line in lines if line.subject == subject]
    return line


async def test_check_says_what_is_captured_and_that_all_is_well(database: Database) -> None:
    database.execute(*FILLED, "CREATE INDEX ON t (at, id)")
    lines = await check(
        database.dsn, {"cursor": "at", "detect_deletes": "10m", "exclude_columns": ["note"]}
    )
    assert {line.level for line in lines} == {"ok"}
    assert by_subject(lines, "table public.t").detail == (
        "2 columns, key: id; cursor: at; polled every 10 s; left out: note; "
        "deletes detected every 10 min"
    )


@pytest.mark.parametrize(
    ("made", "table", "detail", "remedy"),
    [
        (
            ["CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL)"],
            {"cursor": "at"},
            "no index begins with 'at': every poll scans the entire table: ",
            'CREATE INDEX CONCURRENTLY ON "public"."t" ("at");',
        ),
        (
            ["CREATE TABLE t (id int PRIMARY KEY, at date NOT NULL) PARTITION BY LIST (id)"],
            {"cursor": "at"},
            "no index begins with 'at'",
            'CREATE INDEX ON "public"."t" ("at");',
        ),
        (
            [
                "CREATE TABLE t (id int PRIMARY KEY, at timestamptz)",
                "CREATE INDEX ON t (at)",
            ],
            {"cursor": "at"},
            "'at' may be null: rows without a value are found only by scanning the entire table",
            'ALTER TABLE "public"."t" ALTER COLUMN "at" SET NOT NULL;',
        ),
        (
            [
                "CREATE TABLE t (id uuid PRIMARY KEY)",
                "INSERT INTO t SELECT gen_random_uuid() FROM generate_series(1, 10)",
            ],
            {"cursor": "id"},
            "values of 'id' are not of version 7",
            "name a column that increases with every write",
        ),
        (
            [
                "CREATE TABLE t (id int PRIMARY KEY, updated_at timestamptz, fill text)",
                "INSERT INTO t SELECT n, now(), 'x' FROM generate_series(1, 1000) n",
                "ANALYZE t",
            ],
            {},
            "none: every poll scans the entire table: 1,000 rows, ",
            "to an indexed column that increases with every write, such as 'updated_at'",
        ),
    ],
)
async def test_check_says_what_a_cursor_costs_or_misses(
    database: Database, made: list[str], table: dict[str, Any], detail: str, remedy: str
) -> None:
    database.execute(*made)
    line = by_subject(await check(database.dsn, table), "table public.t, cursor")
    assert line.level == ("warn" if table else "ok")  # it is a small table
    assert line.detail.startswith(detail)
    assert remedy in (line.remedy or "")


async def test_a_growing_uuid_is_no_cause_for_a_warning(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id uuid PRIMARY KEY)",
        "INSERT INTO t VALUES ('01890a5d-ac96-774b-bcce-b302099a8057')",
    )
    lines = await check(database.dsn, {"cursor": "id", "deleted": "id2"})
    assert by_subject(lines, "table public.t").level == "fail"
    lines = await check(database.dsn, {"cursor": "id", "detect_deletes": "1h"})
    assert {line.level for line in lines} == {"ok"}


async def test_check_says_that_deletes_are_not_seen(database: Database) -> None:
    database.execute(WHOLE, "CREATE INDEX ON t (at)")
    line = by_subject(await check(database.dsn, {"cursor": "at"}), "table public.t, deletes")
    assert (line.level, "detect_deletes" in (line.remedy or "")) == ("warn", True)


async def test_check_names_what_fails_and_what_matches_nothing(
    database: Database, stranger: str
) -> None:
    database.execute(WHOLE)
    dsn = database.server.dsn(database.name, user=stranger)
    lines = await check(dsn, tables=["public.t", "public.gone", "other.*"])
    assert by_subject(lines, "table public.t").remedy == (
        f'GRANT SELECT ON "public"."t" TO "{stranger}";'
    )
    assert by_subject(lines, "table public.gone").level == "fail"
    assert by_subject(lines, "tables").detail == "no table matches 'other.*' in `tables`"


async def test_check_says_that_clocks_are_apart(database: Database) -> None:
    database.execute(WHOLE)
    assert not [line for line in await check(database.dsn) if line.subject == "clock"]
    later = datetime.now(UTC) + timedelta(minutes=2)
    lines = await preflight("shop", settings(database.dsn), now=lambda: later)
    line = by_subject(lines, "clock")
    assert (line.level, line.remedy) == ("warn", "synchronize both with NTP")


async def test_check_through_a_pooler(database: Database) -> None:
    database.execute(WHOLE)
    with pooler_of(database, "transaction") as pooler:
        line = by_subject(await check(pooler.dsn), "connection")
        assert line.level == "fail"
        assert "pool_mode = session" in (line.remedy or "")
    with pooler_of(database, "session") as pooler:
        assert {line.level for line in await check(pooler.dsn, {"deleted": "note"})} == {"ok"}
