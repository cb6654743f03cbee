"""Comparisons of mirrors with the source, and with the lake as of an epoch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.delta.read import read_raw
from ingestd.testing.oracle.comparison import source_columns, source_key, source_rows
from ingestd.testing.oracle.folding import fold
from ingestd.testing.oracle.schema_history import SchemaHistory
from ingestd.testing.oracle.server_text import FLOAT_TEXTS, text_function
from spark_jobs.epochs import latest
from spark_jobs.lake.exchange import to_arrow
from tests.harness.compare import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ingestd.model.schema import TableId
    from ingestd.testing.oracle.folding import Texts
    from spark_jobs.epochs import MirrorCut
    from tests.harness.databases import Database

SOURCE = "shop"


def assert_mirrors_equal_source(
    spark: SparkSession, database: Database, lake: Path, target: Path, tables: Sequence[TableId]
) -> None:
    """Assert that the newest cut has exactly these tables, each equal to the source's.

    The writers must be idle, and the mirror must have caught up.
    """
    cut = latest(spark, str(target))
    assert sorted(cut) == sorted(map(str, tables))
    wrong = []
    with database.connect() as connection:
        for table in tables:
            columns = source_columns(connection, table)
            there = source_rows(connection, table, columns)
            mirrored = mirror_texts(cut[str(table)], lake_columns(lake, table, columns))
            wrong += differences(str(table), there, mirrored)
    assert not wrong, "\n".join(wrong)


def assert_cut_is_the_fold(
    database: Database, lake: Path, cut: MirrorCut, tables: Sequence[TableId]
) -> list[str]:
    """Assert that these tables in the cut are the plain fold of their raw rows up to the epoch.

    Their columns must not have changed. Returns the names of the tables in the cut.
    """
    wrong, found = [], []
    with database.connect() as connection:
        for table in tables:
            if str(table) not in cut:
                continue
            found.append(str(table))
            columns, key = source_columns(connection, table), source_key(connection, table)
            raw = read_raw(str(lake), SOURCE, table)
            raw = raw.filter(pc.less_equal(raw["_cdc_epoch"], cut.epoch))
            history = SchemaHistory.from_events(registry(lake, SOURCE), table)
            folded = fold(raw, columns, key, history).rows
            mirrored = mirror_texts(cut[str(table)], lake_columns(lake, table, columns))
            wrong += differences(f"{table} at epoch {cut.epoch}", folded, mirrored)
    assert not wrong, "\n".join(wrong)
    return found


def differences(what: str, there: Counter[Texts], mirrored: Counter[Texts]) -> list[str]:
    """Return what either side lacks; empty if they are equal."""
    found = []
    for side, rows in (("missing", there - mirrored), ("too many", mirrored - there)):
        if rows:
            shown = [tuple(t and t[:60] for t in row) for row in list(rows)[:3]]
            found.append(f"{what}: {rows.total()} {side} of {there.total()}, such as {shown}")
    return found


def lake_columns(lake: Path, table: TableId, columns: Sequence[str]) -> list[str]:
    """Return the lake columns that now receive the values of these columns, by `_tables`."""
    events = [e for e in registry(lake, SOURCE) if e["table"] == str(table) and e["columns"]]
    names = {c["source_name"] or c["name"]: c["name"] for c in events[-1]["columns"]}
    return [names[column] for column in columns]


def mirror_texts(mirror: DataFrame, columns: Sequence[str]) -> Counter[Texts]:
    """Return the rows of these columns as the server's texts, with their number of copies."""
    quoted = ["`" + name.replace("`", "``") + "`" for name in [*columns, "_cdc_raw"]]
    rows: pa.Table = to_arrow(mirror.select(*quoted))
    functions = [text_function(field.type) for field in rows.schema][:-1]
    return Counter(
        tuple(
            _text(row[name], dict(row["_cdc_raw"] or ()).get(name), function)
            for name, function in zip(columns, functions, strict=True)
        )
        for row in rows.to_pylist()
    )


def _text(value: Any, raw: str | None, function: Callable[[Any], str]) -> str | None:
    if raw is not None:
        assert value is None, "a value and its text"
        return function(raw) if function in FLOAT_TEXTS else raw
    return None if value is None else function(value)


def cut_epochs(spark: SparkSession, target: Path) -> list[int]:
    """Return the epochs of all rows of `_mirror`, in order."""
    rows = spark.read.format("delta").load(f"{target}/_mirror").select("epoch").collect()
    return sorted(row["epoch"] for row in rows)


def versions(cuts: Mapping[int, MirrorCut], table: TableId) -> list[int]:
    """Return the distinct Delta versions of a table in these cuts."""
    return sorted({cut.versions[str(table)] for cut in cuts.values() if str(table) in cut})
