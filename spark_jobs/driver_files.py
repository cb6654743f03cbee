"""Small Parquet files read and written by the driver itself, through Spark's own file systems.

A Spark job costs a quarter of a second before it reads anything; a file of some MB is here in
milliseconds, from any store that the session can reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def read_parquet(session: SparkSession, folder: str, name: str) -> pa.Table:
    """Read a file, `name` is relative to `folder`. Raises Py4JError if it can't be."""
    path, system = _place(session, folder, name)
    stream = system.open(path)
    try:
        data: bytes = session._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)  # type: ignore[union-attr]  # noqa: SLF001
    finally:
        stream.close()
    # (Spark writes timestamps with nanoseconds, which reach from 1677 to 2262 only)
    return pq.read_table(pa.BufferReader(data), coerce_int96_timestamp_unit="us")


def write_parquet(session: SparkSession, folder: str, name: str, rows: pa.Table) -> int:
    """Write a new file; give its size in bytes. Raises Py4JError if it can't be written."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="snappy")
    data = sink.getvalue().to_pybytes()
    path, system = _place(session, folder, name)
    stream = system.create(path, False)  # noqa: FBT003 - not over a file that is there
    try:
        stream.write(data)
    finally:
        stream.close()
    return len(data)


def _place(session: SparkSession, folder: str, name: str) -> tuple[Any, Any]:
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark has no call for files
    hadoop = jvm.org.apache.hadoop.fs
    path = hadoop.Path(hadoop.Path(folder), name)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return path, path.getFileSystem(configuration)
