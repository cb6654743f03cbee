"""Files that the driver itself reads and writes, in any store that the session can reach.

A Spark job costs a quarter of a second before it reads anything; the driver reads a file of a few
MB in milliseconds. Spark's file systems copy an object store's files through a temporary file.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import open_native, open_plain
from ingestd.model.errors import FolderError
from spark_jobs.delta_log.jvm import HADOOP_PATH, java_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

_BATCH_ROWS = 1 << 16


class TooLargeError(Exception):
    """A file has more rows than fit the memory limit."""


def read_parquet(
    session: SparkSession,
    folder: str,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    max_nbytes: int,
) -> pa.Table:
    """Read a file. `name`: relative to `folder`; `columns`: skips those it lacks, None for all.

    Raises Py4JError or OSError if it can't be read, ArrowException if it is not a Parquet file,
    and TooLargeError if its rows take more than `max_nbytes` of memory.
    """
    path, system = _place(session, folder, name)
    with _on_this_machine(path, system) as here:
        if not _is_local(system):
            copy = _hadoop_path(session, here)
            system.copyToLocalFile(False, path, copy, True)  # noqa: FBT003 - kept; no checksums
        inside = name if _is_local(system) else here.name
        root = here.parents[inside.count("/")]
        with open_native(root, inside, depth=0) as source:
            return _rows(source, columns, max_nbytes)


def write_parquet(session: SparkSession, folder: str, name: str, rows: pa.Table) -> int:
    """Write a new file; return its size in bytes. Raises Py4JError or OSError."""
    path, system = _place(session, folder, name)
    with _on_this_machine(path, system) as here:
        try:
            pq.write_table(rows, here, compression="snappy")
        except OSError:
            here.unlink(missing_ok=True)
            raise
        if not _is_local(system):
            made = _hadoop_path(session, here)
            system.copyFromLocalFile(False, False, made, path)  # noqa: FBT003 - kept; it is new
        return here.stat().st_size


def local_folder(session: SparkSession, path: str) -> Path | None:
    """Return the local folder of a table; None if it is in an object store."""
    folder, system = _place(session, path)
    return Path(folder.toUri().getPath()) if _is_local(system) else None


def ensure_plain(folder: Path, name: str, uri: str) -> None:
    """Raise FolderError if a file named in a log exists but is no regular file of the table.

    `uri`: the table's, for the error.
    """
    try:
        os.close(open_plain(folder, name, depth=0))
    except OddFileError as error:
        raise FolderError(
            f"lake table {uri}: its log names the file {name!a}, and {error.path}"
            f" {error.why}: it is not read",
            remedy="restore the table's folder from a copy, or move it away",
        ) from error
    except FileNotFoundError:
        return  # the reader reports it


def _rows(source: pa.NativeFile, columns: Sequence[str] | None, max_nbytes: int) -> pa.Table:
    # (Spark writes timestamps in nanoseconds, which only cover the years 1677 to 2262)
    with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
        schema = file.schema_arrow
        chosen = None if columns is None else [c for c in columns if c in schema.names]
        nbytes = 0
        found = []
        for batch in file.iter_batches(_BATCH_ROWS, columns=chosen):
            nbytes += batch.nbytes
            if nbytes > max_nbytes:
                raise TooLargeError
            found.append(plain(batch))
        return pa.Table.from_batches(found) if found else plain(file.read(columns=chosen))


@contextmanager
def _on_this_machine(path: Any, system: Any) -> Iterator[Path]:  # noqa: ANN401 - Java's
    """Yield the local path of a file, or a temporary path for one in an object store."""
    if _is_local(system):
        yield Path(path.toUri().getPath())
        return
    with tempfile.TemporaryDirectory(prefix="ingestd-") as own:
        yield Path(own, "file")


def _hadoop_path(session: SparkSession, path: Path) -> Any:  # noqa: ANN401 - Java's
    return java_class(session, HADOOP_PATH)(path.as_uri())


def _is_local(system: Any) -> bool:  # noqa: ANN401 - Java's
    return str(system.getUri().getScheme()) == "file"


def _place(session: SparkSession, folder: str, name: str | None = None) -> tuple[Any, Any]:
    hadoop_path = java_class(session, HADOOP_PATH)  # pyspark has no call for files
    path = hadoop_path(folder) if name is None else hadoop_path(hadoop_path(folder), name)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return path, path.getFileSystem(configuration)
