from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import pytest

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import TableId
from ingestd.ports import ColumnInfo, TableInfo
from ingestd.postgres.catalog.metadata import PostgresMetadata, distinct
from ingestd.testing.fakes.tables import FakeMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ingestd.ports import Metadata
    from tests.harness.databases import Database

CUSTOMERS = TableId("shop", "customers")
NOTES = TableId("shop", "Notes ü")


class Catalog(Protocol):
    """A database with the tables of CUSTOMERS and NOTES, and public.log."""

    def metadata(self, timeout_s: float = 10.0) -> Metadata: ...

    def busy(self) -> AbstractContextManager[None]:
        """Inside, the database does not answer."""


class FakeCatalog:
    def __init__(self) -> None:
        self._made: list[FakeMetadata] = []
        self._tables = [
            TableInfo(
                CUSTOMERS,
                (
                    ColumnInfo("id", "bigint", nullable=False, comment="the number",
                               null_fraction=0.0, distinct=1000.0),
                    ColumnInfo("region", "character varying(10)", nullable=False, comment=None,
                               null_fraction=0.0, distinct=4.0),
                    ColumnInfo("balance", "numeric(12,2)", nullable=True, comment=None,
                               null_fraction=0.25, distinct=10.0),
                ),
                key=("region", "id"), replica_identity="d", comment="who buys",
                rows=1000, bytes=65536,
            ),
            TableInfo(
                NOTES, (ColumnInfo("text", "text", True, None, None, None),),  # noqa: FBT003
                key=(), replica_identity="f", comment=None, rows=None, bytes=0,
            ),
            TableInfo(
                TableId("public", "log"), (ColumnInfo("at", "date", True, None, None, None),),  # noqa: FBT003
                key=(), replica_identity="d", comment=None, rows=None, bytes=0,
            ),
        ]  # fmt: skip

    def metadata(self, timeout_s: float = 10.0) -> Metadata:
        made = FakeMetadata(self._tables, timeout_s=timeout_s)
        self._made.append(made)
        return made

    @contextmanager
    def busy(self) -> Iterator[None]:
        for made in self._made:
            made.answers.clear()
        yield
        for made in self._made:
            made.answers.set()


class PostgresCatalog:
    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute(
            "CREATE SCHEMA shop",
            "CREATE SCHEMA empty",
            "CREATE TABLE log (at date)",
            "CREATE VIEW shop.view AS SELECT 1 AS one",
            """CREATE TABLE shop.customers (
                 id bigint, region varchar(10), dropped int, balance numeric(12,2),
                 PRIMARY KEY (region, id))""",
            "ALTER TABLE shop.customers DROP dropped",
            "COMMENT ON TABLE shop.customers IS 'who buys'",
            "COMMENT ON COLUMN shop.customers.id IS 'the number'",
            """INSERT INTO shop.customers
               SELECT i, 'r' || i % 4, CASE WHEN i % 4 > 0 THEN i % 10 END
                 FROM generate_series(1, 1000) i""",
            "ANALYZE shop.customers",
            'CREATE TABLE shop."Notes ü" (text text)',
            'ALTER TABLE shop."Notes ü" REPLICA IDENTITY FULL',
        )

    def metadata(self, timeout_s: float = 10.0) -> Metadata:
        return PostgresMetadata(self._database.dsn, timeout_s=timeout_s)

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._database.connect(autocommit=False) as connection:
            connection.execute("LOCK pg_class IN ACCESS EXCLUSIVE MODE")
            yield
            connection.rollback()


@pytest.fixture(params=["fake", "postgres"])
def catalog(request: pytest.FixtureRequest) -> Catalog:
    if request.param == "fake":
        return FakeCatalog()
    return PostgresCatalog(request.getfixturevalue("database"))


async def test_schemas_are_those_with_user_tables_sorted(catalog: Catalog) -> None:
    assert await catalog.metadata().schemas() == ["public", "shop"]


async def test_tables_are_sorted_by_name_and_views_are_none(catalog: Catalog) -> None:
    found = await catalog.metadata().tables("shop")
    assert [t.id for t in found] == [NOTES, CUSTOMERS]


@pytest.mark.parametrize("schema", ["nothing", "", "sh%", "pg_catalog", "information_schema"])
async def test_an_unknown_schema_has_no_tables(catalog: Catalog, schema: str) -> None:
    assert await catalog.metadata().tables(schema) == []


async def test_a_table_is_described_completely(catalog: Catalog) -> None:
    _, customers = await catalog.metadata().tables("shop")
    assert [(c.name, c.pg_type, c.nullable, c.comment) for c in customers.columns] == [
        ("id", "bigint", False, "the number"),
        ("region", "character varying(10)", False, None),
        ("balance", "numeric(12,2)", True, None),
    ]
    assert customers.key == ("region", "id")
    assert customers.replica_identity == "d"
    assert customers.comment == "who buys"


async def test_statistics_are_estimates_of_the_rows(catalog: Catalog) -> None:
    _, customers = await catalog.metadata().tables("shop")
    assert customers.rows == 1000
    assert customers.bytes is not None
    assert customers.bytes > 0
    number, region, balance = customers.columns
    assert (number.null_fraction, number.distinct) == (0.0, 1000.0)
    assert region.distinct == 4.0
    assert balance.null_fraction == 0.25


async def test_what_was_never_analysed_has_no_statistics(catalog: Catalog) -> None:
    notes, _ = await catalog.metadata().tables("shop")
    assert notes.rows is None
    assert notes.key == ()
    assert notes.replica_identity == "f"
    assert [(c.null_fraction, c.distinct) for c in notes.columns] == [(None, None)]


async def test_no_answer_in_time_is_transient(catalog: Catalog) -> None:
    metadata = catalog.metadata(timeout_s=0.3)
    with catalog.busy():
        with pytest.raises(TransientError) as caught:
            await metadata.tables("shop")
        assert caught.value.reason == "timeout"
        with pytest.raises(TransientError):
            await metadata.schemas()
    assert await catalog.metadata().schemas() == ["public", "shop"]


async def test_the_partitions_of_a_table_are_its_size(database: Database) -> None:
    database.execute(
        "CREATE TABLE p (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20000)",
        "INSERT INTO p SELECT i, 'v' || i % 5 FROM generate_series(0, 9999) i",
        "ANALYZE p",
    )
    [found] = await PostgresMetadata(database.dsn).tables("public")
    assert found.id == TableId("public", "p")
    assert found.rows == 10_000
    assert found.bytes is not None
    assert found.bytes > 100_000
    assert [c.distinct for c in found.columns] == [10_000, 5]


async def test_without_a_schema_all_tables_are_listed_in_order(catalog: Catalog) -> None:
    found = await catalog.metadata().tables()
    assert [t.id for t in found] == [TableId("public", "log"), NOTES, CUSTOMERS]
    assert found[1:] == await catalog.metadata().tables("shop")


async def test_partitions_are_summed_where_only_they_were_analysed(database: Database) -> None:
    database.execute(
        "CREATE TABLE p (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)",
        "CREATE TABLE p1a PARTITION OF p1 FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20000)",
        "CREATE TABLE none (id int) PARTITION BY RANGE (id)",
        "INSERT INTO p SELECT i, 'v' || i % 5 FROM generate_series(0, 9999) i",
        "ANALYZE p1a",
        "ANALYZE p2",
    )
    none, found = await PostgresMetadata(database.dsn).tables("public")
    assert (found.id.name, found.rows) == ("p", 10_000)
    assert (none.rows, none.bytes) == (None, 0)


async def test_a_locked_table_holds_nothing_up(database: Database) -> None:
    database.execute(
        "CREATE TABLE free (id int)",
        "CREATE TABLE held (id int)",
        "INSERT INTO held SELECT generate_series(1, 1000)",
        "ANALYZE held",
        "CREATE TABLE parent (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE child PARTITION OF parent FOR VALUES FROM (0) TO (10)",
    )
    with database.connect(autocommit=False) as connection:
        connection.execute("LOCK held, child IN ACCESS EXCLUSIVE MODE")
        found = await PostgresMetadata(database.dsn, timeout_s=5.0).tables()
        connection.rollback()
    assert [t.id.name for t in found] == ["free", "held", "parent"]
    assert (found[1].rows, found[1].bytes) == (1000, 5 * 8192)


async def test_a_role_without_rights_sees_all_but_statistics(
    database: Database, stranger: str
) -> None:
    PostgresCatalog(database)
    dsn = database.server.dsn(database.name, user=stranger)
    _, customers = await PostgresMetadata(dsn).tables("shop")
    assert (customers.rows, customers.comment, customers.key) == (
        1000,
        "who buys",
        ("region", "id"),
    )
    assert [c.comment for c in customers.columns] == ["the number", None, None]
    assert {(c.null_fraction, c.distinct) for c in customers.columns} == {(None, None)}


@pytest.mark.parametrize(
    ("n_distinct", "rows", "found"),
    [
        (4.0, None, 4.0),
        (-0.5, 1000, 500.0),
        (-1.0, None, None),
        (0.0, 1000, None),
        (None, 1000, None),
    ],
)
def test_n_distinct_is_a_number_or_a_fraction(
    n_distinct: float | None, rows: int | None, found: float | None
) -> None:
    assert distinct(n_distinct, rows) == found


async def test_a_wrong_database_is_for_a_person(database: Database) -> None:
    metadata = PostgresMetadata(database.server.dsn("nowhere"))
    with pytest.raises(OperatorError, match="nowhere"):
        await metadata.schemas()
