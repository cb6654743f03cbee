"""Deletion vectors, which rows of a file are gone, read and written by Delta's own code.

Rows are told by their numbers in the file. Source: Delta transaction log protocol, "Deletion
Vectors".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ingestd.errors import FolderError
from spark_jobs.jvm import DELTA, HADOOP_PATH, java_class, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = NDArray[np.int64]
_BUFFER = "java.nio.ByteBuffer"
_ABSOLUTE = "p"
"""Storage type of a vector that is named by an absolute path."""
_VECTORS = f"{DELTA}.deletionvectors"


def rows_gone(session: SparkSession, path: str, add: Mapping[str, Any]) -> Rows:
    """Give the rows that a file of the table at `path` does not have any more, ascending.

    `add`: the file's action. Raises Py4JError if they can't be read, FolderError if they lie
    elsewhere.
    """
    if "deletionVector" not in add:
        return np.empty(0, np.int64)
    if add["deletionVector"]["storageType"] == _ABSOLUTE:
        raise FolderError(
            f"lake table {path}: a deletion vector lies elsewhere, by an absolute path, as a"
            " shallow clone has: it is not read",
            remedy="make the table again as a deep clone, or by this job in another target",
        )
    action = java_class(session, f"{DELTA}.actions.Action").fromJson(json.dumps({"add": add}))
    root = java_class(session, HADOOP_PATH)(path)
    found = _store(session).read(action.deletionVector(), root).toArray()
    count = len(found)
    buffer = java_class(session, _BUFFER).allocate(8 * count)
    buffer.asLongBuffer().put(found)
    return np.frombuffer(buffer.array(), ">i8").astype(np.int64)


def write_vectors(session: SparkSession, path: str, every: Sequence[Rows]) -> list[dict[str, Any]]:
    """Write one file of vectors into the folder of the table at `path`; give what tells of each.

    Raises Py4JError if it can't be written.
    """
    store, name = _store(session), java_class(session, "java.util.UUID").randomUUID()
    descriptors = java_class(session, f"{DELTA}.actions.DeletionVectorDescriptor")
    table = store.pathWithFileSystem(java_class(session, HADOOP_PATH)(path))
    writer = store.createWriter(store.generateFileNameInTable(table, name, ""))
    nothing = option(session)
    told = []
    try:
        for rows in every:
            vector = _packed(session, rows)
            place = writer.write(vector)
            offset = option(session, place.offset())
            made = descriptors.onDiskWithRelativePath(
                name, "", place.length(), len(rows), offset, nothing
            )
            told.append(
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
    return told


def _packed(session: SparkSession, rows: Rows) -> bytes:
    buffer = java_class(session, _BUFFER).wrap(rows.astype(">i8").tobytes()).asLongBuffer()
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001
    array = gateway.new_array(gateway.jvm.long, len(rows))
    buffer.get(array)
    sequence = java_class(session, "scala.collection.immutable.ArraySeq").unsafeWrapArray(array)
    bits = java_class(session, f"{_VECTORS}.RoaringBitmapArray").apply(sequence)
    bits.runOptimize()
    form = java_class(session, f"{_VECTORS}.RoaringBitmapArrayFormat").Portable()
    packed: bytes = bits.serializeAsByteArray(form)
    return packed


def _store(session: SparkSession) -> Any:  # noqa: ANN401 - a Scala object
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    stores = java_class(session, f"{DELTA}.storage.dv.DeletionVectorStore$")
    return getattr(stores, "MODULE$").createInstance(configuration)
