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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = NDArray[np.int64]


def rows_gone(session: SparkSession, path: str, add: Mapping[str, Any]) -> Rows:
    """Give the rows that a file of the table at `path` does not have any more, ascending.

    `add`: the file's action. Raises Py4JError if they can't be read.
    """
    if "deletionVector" not in add:
        return np.empty(0, np.int64)
    delta, java, root = _scala(session), session._jvm.java, _hadoop_path(session, path)  # type: ignore[union-attr]  # noqa: SLF001
    action = delta.actions.Action.fromJson(json.dumps({"add": add}))
    found = _store(session).read(action.deletionVector(), root).toArray()
    count = len(found)
    buffer = java.nio.ByteBuffer.allocate(8 * count)
    buffer.asLongBuffer().put(found)
    return np.frombuffer(buffer.array(), ">i8").astype(np.int64)


def write_vectors(session: SparkSession, path: str, every: Sequence[Rows]) -> list[dict[str, Any]]:
    """Write one file of vectors into the folder of the table at `path`; give what tells of each.

    Raises Py4JError if it can't be written.
    """
    delta, jvm = _scala(session), session._jvm  # noqa: SLF001 - Delta has no call for it in Python
    store, name = _store(session), jvm.java.util.UUID.randomUUID()  # type: ignore[union-attr]
    table = store.pathWithFileSystem(_hadoop_path(session, path))
    writer = store.createWriter(store.generateFileNameInTable(table, name, ""))
    nothing = jvm.scala.Option.empty()  # type: ignore[union-attr]
    told = []
    try:
        for rows in every:
            vector = _packed(session, rows)
            place = writer.write(vector)
            offset = jvm.scala.Option.apply(place.offset())  # type: ignore[union-attr]
            made = delta.actions.DeletionVectorDescriptor.onDiskWithRelativePath(
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
    jvm: Any = session._jvm  # noqa: SLF001
    buffer = jvm.java.nio.ByteBuffer.wrap(rows.astype(">i8").tobytes()).asLongBuffer()
    array = session.sparkContext._gateway.new_array(jvm.long, len(rows))  # type: ignore[union-attr]  # noqa: SLF001
    buffer.get(array)
    vectors = _scala(session).deletionvectors
    bits = vectors.RoaringBitmapArray.apply(
        jvm.scala.collection.immutable.ArraySeq.unsafeWrapArray(array)
    )
    bits.runOptimize()
    packed: bytes = bits.serializeAsByteArray(vectors.RoaringBitmapArrayFormat.Portable())
    return packed


def _store(session: SparkSession) -> Any:  # noqa: ANN401 - a Scala object
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    stores = getattr(_scala(session).storage.dv, "DeletionVectorStore$")
    return getattr(stores, "MODULE$").createInstance(configuration)


def _hadoop_path(session: SparkSession, path: str) -> Any:  # noqa: ANN401 - Java's
    return session._jvm.org.apache.hadoop.fs.Path(path)  # type: ignore[union-attr]  # noqa: SLF001


def _scala(session: SparkSession) -> Any:  # noqa: ANN401 - a package of the JVM's
    return session._jvm.org.apache.spark.sql.delta  # type: ignore[union-attr]  # noqa: SLF001
