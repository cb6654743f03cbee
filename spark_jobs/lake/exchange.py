"""Rows between Spark and the driver's memory, as Arrow tables, on every version of Spark.

Values stay exactly what they are. Spark does this itself from 4.0 on. In Spark 3.5, which has no
call for it that keeps a null beside integers, a Python worker passes the rows as Arrow's own bytes.
(The functions of a worker are nested: so they are sent to it, and it need not have this package.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import TimestampType

from spark_jobs.delta_log.statements import quoted
from spark_jobs.lake.columns import with_columns
from spark_jobs.lake.types import arrow_schema, row_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_IS_BUILT_IN = hasattr(DataFrame, "toArrow")


def to_arrow(rows: DataFrame) -> pa.Table:
    """Return the rows in the driver's memory. One Spark job."""
    if _IS_BUILT_IN:
        return rows.toArrow()
    schema = arrow_schema(rows.schema)

    def written(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_stream(stream, batch.schema) as writer:
                writer.write_batch(batch)
            data = stream.getvalue().to_pybytes()
            yield pa.record_batch({"data": pa.array([data], pa.binary())})

    # (it would take a dot in a name for the name of a field)
    plain = rows.toDF(*(f"c{number}" for number in range(len(schema))))
    found = plain.mapInArrow(written, "data binary").collect()
    tables = [pa.ipc.open_stream(row["data"]).read_all() for row in found]
    if not tables:
        return schema.empty_table()
    return pa.concat_tables([table.rename_columns(schema.names).cast(schema) for table in tables])


def to_rows(rows: DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts, with top-level times as datetimes of UTC. One Spark job.

    (`collect` gives naive times of this process's zone: ambiguous when its clock goes back.)
    """
    times = [e.name for e in rows.schema.fields if isinstance(e.dataType, TimestampType)]
    exact = with_columns(rows, {name: f.unix_micros(quoted(name)) for name in times})
    found = [row.asDict(recursive=True) for row in exact.collect()]
    for row in found:
        for name in times:
            if row[name] is not None:
                row[name] = _BEGIN + timedelta(microseconds=row[name])
    return found


def from_arrow(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Return rows of the driver's memory as a DataFrame. No Spark job."""
    schema = row_type(rows.schema)
    if _IS_BUILT_IN:
        return session.createDataFrame(rows, schema)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, arrow_schema(schema)) as writer:
        writer.write_table(rows.cast(arrow_schema(schema)))
    data = stream.getvalue().to_pybytes()

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:  # (Spark waits until its rows are taken)
            pass
        yield from pa.ipc.open_stream(data).read_all().to_batches()

    return session.range(0, 1, 1, 1).mapInArrow(read, schema)
