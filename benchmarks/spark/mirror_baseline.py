"""A straightforward job to mirror raw tables: foreachBatch, row_number, MERGE.

It has one streaming query a table: `python -m benchmarks.spark.mirror_baseline --lake URI --source
NAME --target URI --key id [--once] TABLE ...`. It is kept as a baseline for `spark_jobs.mirror`. It
loses values that the server did not send (TOASTed), and ignores truncates, key changes and epochs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.sql import Window
from pyspark.sql import functions as f

from ingestd.lake.layout import Layout, segment
from ingestd.model.schema import TableId
from spark_jobs.session import local_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def main(arguments: Sequence[str]) -> int:
    """Mirror these tables: the current rows (`--once`), or continuously."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark.mirror_baseline")
    for name in ("--lake", "--source", "--target", "--key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--once", action="store_true", help="apply what exists, then end")
    parser.add_argument(
        "--in-turn", action="store_true", help="one query at a time, again after each epoch"
    )
    parser.add_argument("tables", nargs="+")
    chosen = parser.parse_args(arguments)
    session = local_session("the plain job")
    layout = Layout(chosen.source)

    def start(table: TableId, *, once: bool) -> StreamingQuery:
        raw = f"{chosen.lake}/{layout.raw(table)}"
        return mirror(session, raw, target_path(chosen.target, table), chosen.key, once=once)

    tables = [TableId.parse(text) for text in chosen.tables]
    if chosen.in_turn:
        for _ in _epochs(Path(chosen.lake, layout.epochs)):
            for table in tables:
                start(table, once=True).awaitTermination()
    for query in [start(table, once=chosen.once) for table in tables]:
        query.awaitTermination()
    return 0


def _epochs(folder: Path) -> Iterator[int]:
    """Yield the number of commits in `_epochs` whenever it grows."""
    seen = 0
    while True:
        found = len(list((folder / "_delta_log").glob("[0-9]*.json")))
        if found > seen:
            seen = found
            yield found
        else:
            time.sleep(0.05)


def target_path(target: str, table: TableId) -> str:
    """Return the path of a mirror in `target`."""
    return f"{target}/{segment(table.schema)}/{segment(table.name)}"


def mirror(session: SparkSession, raw: str, target: str, key: str, *, once: bool) -> StreamingQuery:
    """Start the query for one table; with `once` it ends when it has caught up."""
    stream = session.readStream.format("delta").load(raw)
    columns = [name for name in stream.columns if not name.startswith("_cdc_")]
    _make(session, stream, columns, target)
    writer = stream.writeStream.foreachBatch(_merge(target, key, columns)).option(
        "checkpointLocation", f"{target}/_checkpoint"
    )
    return writer.trigger(availableNow=True).start() if once else writer.start()


def _make(session: SparkSession, stream: DataFrame, columns: list[str], target: str) -> None:
    schema = stream.select(*columns).schema
    DeltaTable.createIfNotExists(session).location(target).addColumns(schema).execute()


def _merge(target: str, key: str, columns: list[str]) -> Callable[[DataFrame, int], None]:
    newest_first = Window.partitionBy(key).orderBy(f.desc("_cdc_lsn"), f.desc("_cdc_seq"))

    def merge(batch: DataFrame, _: int) -> None:
        newest = (
            batch.where("_cdc_op <> 't'")
            .withColumn("_rank", f.row_number().over(newest_first))
            .where("_rank = 1")
        )
        values: dict[str, str | Column] = {name: f.col(f"s.{name}") for name in columns}
        (
            DeltaTable.forPath(batch.sparkSession, target)
            .alias("t")
            .merge(newest.alias("s"), f"t.{key} = s.{key}")
            .whenMatchedDelete("s._cdc_op = 'd'")
            .whenMatchedUpdate(set=values)
            .whenNotMatchedInsert("s._cdc_op <> 'd'", values=values)
            .execute()
        )

    return merge


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
