"""Filters that Spark hands to the source."""

from __future__ import annotations

from collections import Counter
from functools import reduce

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tests.spark.reading import Reading, reading

__all__ = ["reading"]

ODD_VALUES = {
    "b": ("boolean", ["true", "false"]),
    "s": ("smallint", ["-32768", "0", "32767"]),
    "i": ("integer", ["-2147483648", "0", "7", "2147483647"]),
    "l": ("bigint", ["-9223372036854775808", "0", "9223372036854775807"]),
    "f": ("real", ["'NaN'", "'-Infinity'", "'-0'", "0.1", "16777217", "'Infinity'"]),
    "d": ("double precision", ["'NaN'", "'-Infinity'", "'-0'", "0.1", "5e-324", "'Infinity'"]),
    "n": ("numeric(12,2)", ["'NaN'", "-9999999999.99", "0", "0.10", "200"]),
    "t": ("text", ["''", "'a'", "'A'", "'ä'", "'a '", "'ab%'", "'zz'"]),
    "v": ("varchar(5)", ["''", "'a'", "'a '", "'Ä'"]),
    "c": ("char(3)", ["''", "'a'", "'a  '", "'abc'"]),
    "y": ("bytea", ["'\\x'", "'\\x00'", "'\\x61ff'", "'\\xff'"]),
    "day": (
        "date",
        [
            *("'-infinity'", "'0001-01-01'", "'1582-10-10'", "'1582-10-15'"),
            *("'2024-02-29'", "'9999-12-31'", "'infinity'"),
        ],
    ),
    "at": (
        "timestamp",
        ["'-infinity'", "'0044-03-15 BC'", "'2024-02-29 23:59:59.999999'", "'9999-12-31 23:59:59'"],
    ),
    "z": (
        "timestamptz",
        [
            *("'-infinity'", "'0044-03-15 BC'", "'1582-10-10 00:00+00'", "'1582-10-15 00:00+00'"),
            *("'2024-02-29 23:59:59.999999+00'", "'infinity'"),
        ],
    ),
    "u": ("uuid", ["'00000000-0000-0000-0000-000000000000'", "gen_random_uuid()"]),
    "j": ("jsonb", ["'{\"a\": 1}'", "'null'"]),
}
FILTERS = r"""
NOT b
s > -1S
i IN (7, NULL)
i <=> 7
NOT i <=> 7
i <=> NULL
NOT i > 7
l = 9223372036854775807
f = float(0.1)
f <= float('NaN')
f = float(0)
d > 1D
d = -0.0D
d <> double('NaN')
n <= 0.10
n IS NULL
t IN ('a', 'A', '')
t = 'ä'
t > 'a'
t LIKE 'a%'
v = 'a'
c = 'a'
y > X'00'
day < DATE'2024-02-29'
day = DATE'1582-10-10'
day IS NULL
at = TIMESTAMP_NTZ'2024-02-29 23:59:59.999999'
at IS NULL
day IN (DATE'1582-10-10', DATE'2024-02-29')
z >= TIMESTAMP'1582-10-10 00:00:00'
z >= TIMESTAMP'2024-01-01 00:00:00'
u > '0'
u = '00000000-0000-0000-0000-000000000000'
i > 0 AND t = 'a' AND n IS NOT NULL
i > 0 OR t = 'a'
_cdc_raw['n'] = 'NaN'
""".strip().splitlines()
"""Each is of one column or more; Spark hands over those parts that it has filters for."""


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_filters_of_every_type_keep_the_rows_that_spark_would(reading: Reading, half: int) -> None:
    filters = FILTERS[half::2]
    table = f"odd_{half}"
    names = list(ODD_VALUES)
    rows = max(len(values) for _, values in ODD_VALUES.values()) + 1
    texts = []
    for i in range(2 * rows):
        each = [
            values[i % (len(values) + 1) :][:1] or ["NULL"] for _, values in ODD_VALUES.values()
        ]
        texts.append(f"({i}, {', '.join(value for [value] in each)})")
    reading.database.execute(
        f"CREATE TABLE {table} (id int, {', '.join(f'{n} {ODD_VALUES[n][0]}' for n in names)})",
        f"INSERT INTO {table} VALUES {', '.join(texts)}",
    )
    everything = reading.load(f"public.{table}")
    held = [f"coalesce({found}, false) AS f{i}" for i, found in enumerate(filters)]
    wanted = everything.selectExpr("id", *held).collect()
    spark = reading.spark
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        # A load() for each filter: see spark_jobs.datasource.
        parts = [
            reading.load(f"public.{table}", pushdown="true", partitions=1)
            .where(found)
            .selectExpr(f"{i} AS f", "id")
            for i, found in enumerate(filters)
        ]
        whole = reduce(lambda one, other: one.unionAll(other), parts)
        found = Counter((row["f"], row["id"]) for row in whole.collect())
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    wrong = [
        f"{filters[i]}: row {row['id']} is {'missing' if row[f'f{i}'] else 'too much'}"
        for row in wanted
        for i in range(len(filters))
        if found[i, row["id"]] != int(row[f"f{i}"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
def test_a_loaded_frame_takes_the_filters_of_one_plan(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE filtered (id int)", "INSERT INTO filtered SELECT generate_series(1, 100)"
    )
    spark = reading.spark
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        # Without the option Spark mixes up nothing.
        safe = reading.load("public.filtered")
        assert safe.where("id > 90").count() == 10
        assert safe.count() == 100
        assert safe.where("id > 50").join(safe.where("id < 60"), "id").count() == 9
        pushed = reading.load("public.filtered", pushdown="true")
        assert pushed.where("id > 90").count() == 10
        assert "Filter (" not in plan_of(pushed.where("id > 90"))
        with pytest.raises(PySparkException, match="planned with other filters"):
            pushed.where("id > 50").count()
        again = reading.load("public.filtered", pushdown="true")
        assert again.where("id > 90").count() == 10
        with pytest.raises(PySparkException, match="another query reads a plan made"):
            again.count()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    with pytest.raises(PySparkException, match="filterPushdown"):  # Spark's own words
        reading.load("public.filtered", pushdown="true").count()


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())  # noqa: SLF001 - Spark's
