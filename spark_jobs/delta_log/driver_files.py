"""Files read and written by the driver itself, in any store that the session can reach.

A Spark job costs a quarter of a second before it reads anything; a file of some MB is here in
milliseconds. Files of stores go through a temporary one, by Spark's own file systems.
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
from ingestd.lake.store.plain_files import OddFileError, open_native, open_plain
from ingestd.model.errors import FolderError
from spark_jobs.delta_log.jvm import HADOOP_PATH, java_class

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
    """Write a new file; give its size in bytes. Raises Py4JError or OSError if it can't be."""
    path, system = _place(session, folder, name)
    with _on_this_machine(path, system) as here:
        try:
            pq.write_table(rows, here, compression="snappy")
        except OSError:
            here.unlink(missing_ok=True)
            raise
        if not _is_local(system):
            made = _hadoop_path(session, here)
            system.copyFromLocalFile(False, False, made, path)  # noqa: FBT003 - kept; none is there
        return here.stat().st_size


def local_folder(session: SparkSession, path: str) -> Path | None:
    """Return the folder that a table lies in, None in a store."""
    folder, system = _place(session, path)
    return Path(folder.toUri().getPath()) if _is_local(system) else None


def ensure_plain(folder: Path, name: str, uri: str) -> None:
    """Raise FolderError if what a log names is there and no regular file of the table's folder.

    `uri`: where the table is, for the error.
    """
    try:
        os.close(open_plain(folder, name, depth=0))
    except OddFileError as error:
        raise FolderError(
            f"lake table {uri}: its log names the file {name!a}, and {error.path}"
            f" {error.why}: it is not read",
            remedy="put the table's folder back from a copy, or move it away",
        ) from error
    except FileNotFoundError:
        return  # the reader reports it


def _rows(source: pa.NativeFile, columns: Sequence[str] | None, max_nbytes: int) -> pa.Table:
    # (Spark writes timestamps with nanoseconds, which reach from 1677 to 2262 only)
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
    """Return where a file is, or where one of a store may be meanwhile."""
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
