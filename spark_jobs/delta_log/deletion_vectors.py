"""Deletion vectors (the deleted rows of a file), read and written by Delta's own code.

Rows are identified by their number in the file. Source: Delta transaction log protocol, "Deletion
Vectors".
"""

from __future__ import annotations

import json
import re
from base64 import b85decode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from ingestd.lake.delta.log_paths import file_of
from ingestd.model.errors import FolderError
from spark_jobs.delta_log.driver_files import ensure_plain, local_folder
from spark_jobs.delta_log.jvm import DELTA, HADOOP_PATH, java_class, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = NDArray[np.int64]
_BUFFER = "java.nio.ByteBuffer"
_INLINE, _RELATIVE = "i", "u"
"""Storage types of a vector in the log, and of one in a file of the table's folder."""
VECTOR_ID_LENGTH = 20
"""Number of characters that name a file of vectors; those before them name a folder."""
_FOLDER = re.compile(r"[A-Za-z0-9]*")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_AS_B85 = str.maketrans(_Z85, _B85)
_VECTORS = f"{DELTA}.deletionvectors"


def vector_files_of(vector: Mapping[str, Any], uri: str) -> list[str]:
    """Return the paths, inside the table, of the files that hold a vector.

    That is one path, or none for a vector in the log. `uri`: the table's. Raises FolderError for a
    file that is not the table's own.
    """
    kind, text = vector["storageType"], vector["pathOrInlineDv"]
    if kind == _INLINE:
        return []
    folder, packed = text[:-VECTOR_ID_LENGTH], text[-VECTOR_ID_LENGTH:]
    try:
        name = f"deletion_vector_{UUID(bytes=b85decode(packed.translate(_AS_B85)))}.bin"
    except ValueError:
        name = ""
    if kind != _RELATIVE or not name or not _FOLDER.fullmatch(folder):
        raise FolderError(
            f"lake table {uri}: a deletion vector is stored elsewhere ({ascii(text)[:80]}), as in a"
            " shallow clone: it is not read",
            remedy="re-create the table as a deep clone, or write it by this job to a new target",
        )
    return [file_of(f"{folder}/{name}" if folder else name, uri)]


def rows_gone(session: SparkSession, path: str, add: Mapping[str, Any]) -> Rows:
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
    found = _store(session).read(action.deletionVector(), root).toArray()
    count = len(found)
    buffer = java_class(session, _BUFFER).allocate(8 * count)
    buffer.asLongBuffer().put(found)
    return np.frombuffer(buffer.array(), ">i8").astype(np.int64)


def write_vectors(session: SparkSession, path: str, every: Sequence[Rows]) -> list[dict[str, Any]]:
    """Write one file of vectors into the folder of the table at `path`; return their descriptors.

    Raises Py4JError if it can't be written.
    """
    store, name = _store(session), java_class(session, "java.util.UUID").randomUUID()
    descriptors = java_class(session, f"{DELTA}.actions.DeletionVectorDescriptor")
    table = store.pathWithFileSystem(java_class(session, HADOOP_PATH)(path))
    writer = store.createWriter(store.generateFileNameInTable(table, name, ""))
    nothing = option(session)
    written = []
    try:
        for rows in every:
            vector = _packed(session, rows)
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
