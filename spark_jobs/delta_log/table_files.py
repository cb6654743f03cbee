"""Where the files of a Delta table are, and which files its log may name.

Source: Delta transaction log protocol, "Deletion Vectors".
"""

from __future__ import annotations

import os
import re
from base64 import b85decode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import open_plain
from ingestd.model.errors import FolderError
from spark_jobs.delta_log.jvm import HADOOP_PATH, java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INLINE, _RELATIVE = "i", "u"
"""Storage types of a vector in the log, and of one in a file of the table's folder."""
VECTOR_ID_LENGTH = 20
"""Number of characters that name a file of vectors; those before them name a folder."""
_FOLDER = re.compile(r"[A-Za-z0-9]*")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_AS_B85 = str.maketrans(_Z85, _B85)


def local_folder(session: SparkSession, path: str) -> Path | None:
    """Return the local folder of a table; None if it is in an object store."""
    folder, system = place_of(session, path)
    return Path(folder.toUri().getPath()) if is_local(system) else None


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


def is_local(system: Any) -> bool:  # noqa: ANN401 - Java's
    """Return whether a file system of Hadoop is that of the local disks."""
    return str(system.getUri().getScheme()) == "file"


def place_of(session: SparkSession, folder: str, name: str | None = None) -> tuple[Any, Any]:
    """Return a folder, or a file in it, as Hadoop's path, and its file system."""
    hadoop_path = java_class(session, HADOOP_PATH)  # pyspark has no call for files
    path = hadoop_path(folder) if name is None else hadoop_path(hadoop_path(folder), name)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return path, path.getFileSystem(configuration)


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
