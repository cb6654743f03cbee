"""Files read and written by the driver itself, in any store that the session can reach.

A Spark job costs a quarter of a second before it reads anything; a file of some MB is here in
milliseconds. Files of stores go through a temporary one, by Spark's own file systems.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

_BATCH_ROWS = 1 << 16


class TooLargeError(Exception):
    """A file has more than may be held in memory."""


def read_parquet(
    session: SparkSession,
    folder: str,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    max_nbytes: int,
) -> pa.Table:
    """Read a file, `name` is relative to `folder`; of `columns` those that it has, None for all.

    Raises Py4JError or OSError if it can't be read, ArrowException if it is none, TooLargeError if
    its rows take more than `max_nbytes` of memory.
    """
    with (
        _local_copy(session, folder, name) as path,
        # (Spark writes timestamps with nanoseconds, which reach from 1677 to 2262 only)
        pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file,
    ):
        schema = file.schema_arrow
        chosen = None if columns is None else [c for c in columns if c in schema.names]
        nbytes = 0
        found = []
        for batch in file.iter_batches(_BATCH_ROWS, columns=chosen):
            nbytes += batch.nbytes
            if nbytes > max_nbytes:
                raise TooLargeError(f"{folder}/{name}")
            found.append(batch)
        return pa.Table.from_batches(found) if found else file.read(columns=chosen)


def write_parquet(session: SparkSession, folder: str, name: str, rows: pa.Table) -> int:
    """Write a new file; give its size in bytes. Raises Py4JError or OSError if it can't be."""
    with _new_file(session, folder, name) as path:
        pq.write_table(rows, path, compression="snappy")
        return path.stat().st_size


@contextmanager
def _local_copy(session: SparkSession, folder: str, name: str) -> Iterator[Path]:
    path, system = _place(session, folder, name)
    if _is_local(system):
        yield Path(path.toUri().getPath())
        return
    with tempfile.TemporaryDirectory(prefix="ingestd-") as own:
        copy = Path(own, "copy")
        system.copyToLocalFile(False, path, _hadoop_path(session, copy), True)  # noqa: FBT003
        yield copy


@contextmanager
def _new_file(session: SparkSession, folder: str, name: str) -> Iterator[Path]:
    path, system = _place(session, folder, name)
    if _is_local(system):
        yield Path(path.toUri().getPath())
        return
    with tempfile.TemporaryDirectory(prefix="ingestd-") as own:
        made = Path(own, "made")
        yield made
        # (not the source deleted, not over a file that is there)
        system.copyFromLocalFile(False, False, _hadoop_path(session, made), path)  # noqa: FBT003


def _hadoop_path(session: SparkSession, path: Path) -> Any:  # noqa: ANN401 - Java's
    return session._jvm.org.apache.hadoop.fs.Path(path.as_uri())  # type: ignore[union-attr]  # noqa: SLF001


def _is_local(system: Any) -> bool:  # noqa: ANN401 - Java's
    return str(system.getUri().getScheme()) == "file"


def _place(session: SparkSession, folder: str, name: str) -> tuple[Any, Any]:
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark has no call for files
    hadoop = jvm.org.apache.hadoop.fs
    path = hadoop.Path(hadoop.Path(folder), name)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return path, path.getFileSystem(configuration)
