"""Files that the driver itself reads and writes, in any store that the session can reach.

A Spark job costs a quarter of a second before it reads anything; the driver reads a file of a few
MB in milliseconds. Spark's file systems copy an object store's files through a temporary file.

Deletion vectors (the numbers of a file's deleted rows) are read and written by Delta's own code.
Source: Delta transaction log protocol, "Deletion Vectors".
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.delta.data_files import DataFileReader
from ingestd.lake.store.plain_files import open_native
from spark_jobs.accelerator.jvm import DELTA, HADOOP_PATH, java_class, option
from spark_jobs.accelerator.places import is_local, local_folder, place_of
from spark_jobs.delta_log.table_files import ensure_plain, vector_files_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    path, system = place_of(session, folder, name)
    with _on_this_machine(path, system) as here:
        if not is_local(system):
            copy = _hadoop_path(session, here)
            system.copyToLocalFile(False, path, copy, True)  # noqa: FBT003 - kept; no checksums
        inside = name if is_local(system) else here.name
        root = here.parents[inside.count("/")]
        with open_native(root, inside, depth=0) as source:
            return _rows(source, f"{folder}/{name}", columns, max_nbytes)


def write_parquet(session: SparkSession, folder: str, name: str, rows: pa.Table) -> int:
    """Write a new file; return its size in bytes. Raises Py4JError or OSError."""
    path, system = place_of(session, folder, name)
    with _on_this_machine(path, system) as here:
        try:
            pq.write_table(rows, here, compression="snappy")
        except OSError:
            here.unlink(missing_ok=True)
            raise
        if not is_local(system):
            made = _hadoop_path(session, here)
            system.copyFromLocalFile(False, False, made, path)  # noqa: FBT003 - kept; it is new
        return here.stat().st_size


def _rows(
    source: pa.NativeFile, path: str, columns: Sequence[str] | None, max_nbytes: int
) -> pa.Table:
    file = DataFileReader(source, path)
    schema = file.schema
    chosen = [c for c in (schema.names if columns is None else columns) if c in schema.names]
    nbytes = 0
    found = []
    for batch in file.batches(chosen, most_rows=_BATCH_ROWS):
        nbytes += batch.nbytes
        if nbytes > max_nbytes:
            raise TooLargeError
        found.append(plain(batch))
    empty = pa.schema([schema.field(c) for c in chosen]).empty_table()
    return pa.Table.from_batches(found) if found else plain(empty)


@contextmanager
def _on_this_machine(path: Any, system: Any) -> Iterator[Path]:  # noqa: ANN401 - Java's
    """Yield the local path of a file, or a temporary path for one in an object store."""
    if is_local(system):
        yield Path(path.toUri().getPath())
        return
    with tempfile.TemporaryDirectory(prefix="ingestd-") as own:
        yield Path(own, "file")


def _hadoop_path(session: SparkSession, path: Path) -> Any:  # noqa: ANN401 - Java's
    return java_class(session, HADOOP_PATH)(path.as_uri())


# --- deletion vectors -----------------------------------------------------------------------------

Rows = NDArray[np.int64]
_BUFFER = "java.nio.ByteBuffer"
_VECTORS = f"{DELTA}.deletionvectors"


def deleted_rows(session: SparkSession, path: str, add: Mapping[str, Any]) -> Rows:
    """Return the numbers of a file's deleted rows, ascending. `path`: the table's.

    `add`: the file's action. Raises Py4JError if the vector can't be read, FolderError if it is
    stored elsewhere.
    """
    if "deletionVector" not in add:
        return np.empty(0, np.int64)
    local = local_folder(session, path)
    for name in vector_files_of(add["deletionVector"], path):
        if local is not None:
            ensure_plain(local, name, path)
    action = java_class(session, f"{DELTA}.actions.Action").fromJson(json.dumps({"add": add}))
    root = java_class(session, HADOOP_PATH)(path)
    found = vector_store(session).read(action.deletionVector(), root).toArray()
    count = len(found)
    buffer = java_class(session, _BUFFER).allocate(8 * count)
    buffer.asLongBuffer().put(found)
    return np.frombuffer(buffer.array(), ">i8").astype(np.int64)


def write_vectors(session: SparkSession, path: str, every: Sequence[Rows]) -> list[dict[str, Any]]:
    """Write one file of vectors into the folder of the table at `path`; return their descriptors.

    Raises Py4JError if it can't be written.
    """
    store, name = vector_store(session), java_class(session, "java.util.UUID").randomUUID()
    descriptors = java_class(session, f"{DELTA}.actions.DeletionVectorDescriptor")
    table = store.pathWithFileSystem(java_class(session, HADOOP_PATH)(path))
    writer = store.createWriter(store.generateFileNameInTable(table, name, ""))
    nothing = option(session)
    written = []
    try:
        for rows in every:
            vector = packed_vector(session, rows)
            place = writer.write(vector)
            offset = option(session, place.offset())
            made = descriptors.onDiskWithRelativePath(
                name, "", place.length(), len(rows), offset, nothing
            )
            written.append(
                {
                    "storageType": made.storageType(),
                    "pathOrInlineDv": made.pathOrInlineDv(),
                    "offset": place.offset(),
                    "sizeInBytes": made.sizeInBytes(),
                    "cardinality": made.cardinality(),
                }
            )
    finally:
        writer.close()
    return written


def packed_vector(session: SparkSession, rows: Rows) -> bytes:
    """Return the vector of these rows in the form of the protocol. Raises Py4JError."""
    buffer = java_class(session, _BUFFER).wrap(rows.astype(">i8").tobytes()).asLongBuffer()
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001
    array = gateway.new_array(gateway.jvm.long, len(rows))
    buffer.get(array)
    if session.version.startswith("3."):  # with Scala 2.12
        sequence = java_class(session, "scala.collection.mutable.WrappedArray").make(array)
    else:
        sequence = java_class(session, "scala.collection.immutable.ArraySeq").unsafeWrapArray(array)
    bits = java_class(session, f"{_VECTORS}.RoaringBitmapArray").apply(sequence)
    bits.runOptimize()
    form = java_class(session, f"{_VECTORS}.RoaringBitmapArrayFormat").Portable()
    packed: bytes = bits.serializeAsByteArray(form)
    return packed


def vector_store(session: SparkSession) -> Any:  # noqa: ANN401 - a Scala object
    """Return Delta's reader and writer of vectors. Raises Py4JError."""
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    stores = java_class(session, f"{DELTA}.storage.dv.DeletionVectorStore$")
    return getattr(stores, "MODULE$").createInstance(configuration)
