"""Checked conversion of a path in a Delta log to a file of that table.

Anyone who can write to the log can name any path in it. Source: Delta protocol, "Add File and
Remove File": a path is relative to the table, or absolute, and percent-encoded as in RFC 2396.
Absolute paths, as shallow clones have, are refused: ingestd makes none. So is any path that two
readers could take for different files.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from ingestd.lake.store.paths import why_odd
from ingestd.model.errors import FolderError

OWN_FILE = re.compile(r"part-[A-Za-z0-9._-]+\.parquet\Z")
"""Names of data files as ingestd, deltalake and Spark form them; they contain no escapes."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MOST_PART_BYTES, _MOST_BYTES = 255, 1024
_SHOWN = 80


def file_of(path: object, uri: str) -> str:
    """Return the file's decoded path relative to its table, always inside the table's folder.

    `path`: as an action of the log has it; `uri`: the table's location. Raise FolderError.
    """
    if not isinstance(path, str):
        raise _refusal(path, uri, "which is not a string")
    try:
        decoded = unquote(path, errors="strict")
        nbytes = len(decoded.encode())
    except UnicodeError:
        raise _refusal(path, uri, "which is not UTF-8") from None
    why = _why_not(path, decoded)
    if why is None and nbytes > _MOST_BYTES:
        why = "which is too long"
    if why is not None:
        raise _refusal(path, uri, why)
    return decoded


def _why_not(path: str, decoded: str) -> str | None:
    is_absolute = decoded.startswith("/") or _SCHEME.match(decoded) or _SCHEME.match(path)
    if is_absolute:
        return "which is absolute, as in a shallow clone"
    why = why_odd(decoded)
    if why is not None:
        return why
    if "?" in path or "#" in path:
        return "which has characters that no file name in a lake has"
    parts = decoded.split("/")
    if parts[0] == "_delta_log":
        return "which is not a data file"
    if any(len(part.encode()) > _MOST_PART_BYTES for part in parts):
        return "which is too long"
    return None


def _refusal(path: object, uri: str, why: str) -> FolderError:
    shown = ascii(path)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return FolderError(
        f"lake table {uri}: its log names the file {shown}, {why}; ingestd neither reads nor"
        " removes it",
        remedy="put the table's folder back from a copy, or move it away",
    )
