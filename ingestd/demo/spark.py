"""A PySpark stream read of a raw table: `python -m ingestd.demo.spark TABLE_PATH KEY...`.

It runs in a separate process, so that no JVM survives the demo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING

from ingestd.model.errors import OperatorError
from spark_jobs.session import local_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession


def stream_read(session: SparkSession, table_path: str, folder: str) -> DataFrame:
    """Stream the raw table's rows since the last call; return all rows read so far.

    `folder`: for the stream's checkpoint and the rows.
    """
    rows = f"{folder}/rows"
    stream = session.readStream.format("delta").load(table_path)
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .option("path", rows)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return session.read.parquet(rows)


def current_rows(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """Return the current rows: the newest change per key by (_cdc_lsn, _cdc_seq), without deletes.

    Every row below the last `t` is void. (Columns that the server did not send, `_cdc_unchanged`,
    are not filled in here.)
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - optional dependency

    position = f.struct("_cdc_lsn", "_cdc_seq")
    void_below = changes.where("_cdc_op = 't'").agg(f.max(position).alias("void_below"))
    newest = (
        changes.where("_cdc_op <> 't'")
        .crossJoin(void_below)
        .where(f.col("void_below").isNull() | (position > f.col("void_below")))
        .groupBy(*key)
        .agg(f.max_by(f.struct(*changes.columns), position).alias("newest"))
        .select("newest.*")
    )
    return newest.where("_cdc_op <> 'd'")


def main(arguments: Sequence[str]) -> int:
    """Stream a table, print its newest rows and their number; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ingestd.demo.spark")
    parser.add_argument("table_path")
    parser.add_argument("key", nargs="+")
    parser.add_argument("--expect", type=int, help="fail unless this is the number of current rows")
    chosen = parser.parse_args(arguments)
    try:
        session = local_session("ingestd demo")
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="ingestd-stream-") as folder:
            changes = stream_read(session, chosen.table_path, folder).cache()
            rows = current_rows(changes, chosen.key).cache()
            columns = [c for c in rows.columns if not c.startswith("_cdc_")]
            count = rows.count()
            sys.stdout.write(f"{changes.count():,} changes read, {count:,} current rows\n")
            rows.orderBy("_cdc_lsn", "_cdc_seq", ascending=False).select(
                *columns, "_cdc_op", "_cdc_lsn", "_cdc_epoch"
            ).show(5, truncate=24)
    finally:
        session.stop()
    return 0 if chosen.expect is None or count == chosen.expect else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
