"""`format("ingestd")`: tables of a live Postgres in Spark."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pyarrow as pa
import pytest
from psycopg import conninfo
from pyspark.errors import ArithmeticException, PySparkException

from spark_jobs.lake.exchange import to_arrow
from tests.harness.round_trip import read_texts, row_faults
from tests.harness.types import BUILT_IN
from tests.harness.user_types import SETUP
from tests.harness.wide_tables import Wide, array_columns_of, columns_of
from tests.spark.reading import Reading, reading

__all__ = ["reading"]


@pytest.mark.thorough
def test_a_table_is_read_in_the_partitions_that_are_asked_for(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE numbers (id int PRIMARY KEY, note text)",
        "INSERT INTO numbers SELECT i, 'n' || i FROM generate_series(1, 20000) i",
    )
    loaded = reading.load("public.numbers", partitions=3)
    assert loaded.dtypes == [("id", "int"), ("note", "string"), ("_cdc_raw", "map<string,string>")]
    assert loaded.rdd.getNumPartitions() == 3
    [row] = loaded.selectExpr(
        "count(*)", "sum(id)", "count(distinct note)", "count(_cdc_raw)"
    ).collect()
    assert tuple(row) == (20000, 200010000, 20000, 0)


def test_every_value_of_every_type_is_whole(reading: Reading) -> None:
    reading.database.execute(*SETUP)
    table = Wide("every_type", [*columns_of(BUILT_IN), *array_columns_of(BUILT_IN)])
    table.create(reading.database)
    texts = read_texts(reading.database, table.name, table.names)
    loaded = reading.load("public.every_type", partitions=2)
    arrow = to_arrow(loaded)
    schema = arrow.schema.append(pa.field("_cdc_before", pa.null()))
    rows = {row["id"]: row for row in arrow.to_pylist(maps_as_pydicts="strict")}
    assert sorted(rows) == sorted(texts)
    wrong = [
        fault
        for i, row in rows.items()
        for fault in row_faults(row | {"_cdc_before": None}, schema, texts[i], None)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
def test_limit_columns_and_where(reading: Reading) -> None:
    reading.database.execute(
        'CREATE TABLE picked (id int PRIMARY KEY, "a,b" text, c int, "Ünï" bool)',
        "INSERT INTO picked SELECT i, 't' || i, i % 10, i % 2 = 0 FROM generate_series(1, 9000) i",
    )
    assert reading.load("public.picked", limit=5).count() == 5
    assert reading.load("public.picked", limit=0).count() == 0
    assert reading.load("public.picked", limit=100000).count() == 9000
    some = reading.load("public.picked", columns='["Ünï", "a,b"]', raw="false")
    assert some.columns == ["Ünï", "a,b"]
    assert some.where("`Ünï`").count() == 4500
    where = reading.load("public.picked", where="c = 3 OR id = 1 -- so", columns="id")
    assert where.count() == 901
    chosen = reading.load("public.picked", columns="c,id", where="id = 7").collect()
    assert [tuple(row)[:2] for row in chosen] == [(7, 7)]


def test_a_partitioned_table_is_read_once(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE parted (id int, day int) PARTITION BY LIST (day)",
        *(f"CREATE TABLE parted_{n} PARTITION OF parted FOR VALUES IN ({n})" for n in range(7)),
        "INSERT INTO parted SELECT i, i % 7 FROM generate_series(1, 7000) i",
    )
    loaded = reading.load("public.parted", partitions=3)
    assert loaded.rdd.getNumPartitions() == 3
    assert loaded.groupBy("day").count().where("count = 1000").count() == 7
    reading.database.execute(
        "CREATE TABLE parted_7 PARTITION OF parted FOR VALUES IN (7)",
        "INSERT INTO parted VALUES (0, 7)",
    )
    assert loaded.count() == 7001


def test_the_configs_columns_hold(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, name text, email text, note text)",
        "INSERT INTO people VALUES (1, 'Ada', 'a@b.c', 'secret'), (2, 'Bo', 'a@b.c', 'secret')",
    )
    section = """
[sources.shop.table."public.people"]
exclude_columns = ["note"]
mask_columns = { email = "sha256", name = "null" }
types = { id = "long" }
"""
    config = reading.config.replace("slot =", 'mask_key = "k"\nslot =') + section
    masked = replace(reading, config=config)
    loaded = masked.load("public.people")
    assert loaded.dtypes[:-1] == [("id", "bigint"), ("name", "string"), ("email", "string")]
    rows = loaded.orderBy("id").collect()
    assert [row["id"] for row in rows] == [1, 2]
    assert {row["name"] for row in rows} == {None}
    [digest] = {row["email"] for row in rows}
    assert len(digest) == 64
    assert digest != sha256(b"a@b.c").hexdigest()
    with pytest.raises(PySparkException, match="has no column 'note'"):
        masked.load("public.people", columns="id,note")


def test_a_schema_chooses_columns(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE shaped (id int, t text)", "INSERT INTO shaped VALUES (1, 'x')"
    )
    reader = reading.reader("public.shaped").schema("t string")
    assert [tuple(row) for row in reader.load().collect()] == [("x",)]
    with pytest.raises(PySparkException, match=r"column 'id' of table public\.shaped is int"):
        reading.reader("public.shaped").schema("id string").load().collect()


WRONG = [
    ({"colums": "id"}, "option colums: there is no such option; did you mean 'columns'"),
    ({"partitions": "0"}, "option partitions: write a whole number above 0"),
    ({"source": "stop"}, "has no source 'stop'"),
    ({"table": "public.acounts"}, "does not exist.*did you mean 'public.wrongs'|does not exist"),
    ({"table": "wrongs"}, "option table: 'wrongs' is not `schema.table`"),
    ({"table": "public.hidden"}, "`tables` of sources.shop does not include public.hidden"),
    ({"where": "id = "}, "the condition is invalid"),
    ({"where": "id = 1) OR (true"}, "the condition is invalid"),
    ({"config": "/nowhere/ingestd.toml"}, "the config file can't be read"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_is_wrong_is_said(reading: Reading, options: dict[str, str], said: str) -> None:
    reading.database.execute(
        "CREATE TABLE IF NOT EXISTS wrongs (id int)", "CREATE TABLE IF NOT EXISTS hidden (id int)"
    )
    with pytest.raises(PySparkException, match=said) as raised:
        reading.load(**{"table": "public.wrongs"} | options)
    assert reading.database.dsn not in str(raised.value)


@pytest.mark.thorough
def test_missing_rights_are_said(reading: Reading) -> None:
    role = f"{reading.database.name}_reader"
    reading.database.execute(
        "CREATE TABLE guarded (id int PRIMARY KEY)", f"CREATE ROLE {role} LOGIN"
    )
    try:
        dsn = conninfo.make_conninfo(reading.database.dsn, user=role)
        config = reading.config.replace(reading.database.dsn, dsn)
        with pytest.raises(PySparkException, match=f"GRANT SELECT ON .* TO \\W*{role}"):
            replace(reading, config=config).load("public.guarded").count()
        reading.database.execute(f"GRANT SELECT ON guarded TO {role}")
        # a reader need not own it: enough here
        assert replace(reading, config=config).load("public.guarded").count() == 0
    finally:
        reading.database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_no_secret_is_shown(reading: Reading, capfd: pytest.CaptureFixture[str]) -> None:
    reading.database.execute("CREATE TABLE shown (id int)", "INSERT INTO shown VALUES (1)")
    secret = reading.database.server.password
    dsn = conninfo.make_conninfo(reading.database.dsn, password=secret)
    loaded = replace(reading, config=reading.config.replace(reading.database.dsn, dsn)).load(
        "public.shown"
    )
    loaded.explain("formatted")
    loaded.explain(extended=True)
    with pytest.raises(ArithmeticException) as raised:
        loaded.selectExpr("1 / (id - 1)").collect()
    text = "".join(capfd.readouterr()) + str(raised.value)
    assert "ingestd" in text
    assert secret not in text
