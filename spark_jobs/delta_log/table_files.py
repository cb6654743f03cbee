"""Where the files of a Delta table are, and which files its log may name.

Source: Delta transaction log protocol, "Deletion Vectors".
"""

from __future__ import annotations

import os
import re
from base64 import b85decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import open_plain
from ingestd.model.errors import FolderError

_INLINE, _RELATIVE = "i", "u"
"""Storage types of a vector in the log, and of one in a file of the table's folder."""
VECTOR_ID_LENGTH = 20
"""Number of characters that name a file of vectors; those before them name a folder."""
_FOLDER = re.compile(r"[A-Za-z0-9]*")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_AS_B85 = str.maketrans(_Z85, _B85)


def folder_here(uri: str) -> Path | None:
    """Return the folder of a lake or a table on this machine; None if it is elsewhere.

    `uri`: as Spark names it (`cli.arguments.spark_uri`).
    """
    folder = Path(uri)
    return folder if "://" not in uri and folder.is_dir() else None


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
