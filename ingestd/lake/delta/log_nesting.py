"""Limits on the nesting of a log's files: deltalake overflows its stack, which ends the process.

Measured with deltalake 1.6, whose threads have 2 MB of stack: it dies of 3,000 levels of a Parquet
schema, and of 28,000 levels of JSON (not of 24,000), in a field of another type or in a file's
statistics, also those in a checkpoint. No action that ingestd or Spark writes has 20 levels. Its
parser of JSON is lax: values need no line of their own, and a string may contain a newline. So
either a file has too few brackets to be nested deep however they are read, or each of its lines
must be strict JSON.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.delta.log_room import Room, SizedCheckpoint
from ingestd.lake.store.paths import OddFileError
from ingestd.model.recorded import RecordError, ensure_depth

MOST_DEPTH = 100
"""Of JSON; pyarrow has the same limit for the schema of a Parquet file."""
MOST_LINE_BYTES = 4 << 20
"""Maximum size of one action: the metadata of 1,600 columns takes 0.9 MB."""
FEW_BRACKETS = 4096
"""So many can't be nested too deep for deltalake. A commit of few files has fewer bytes."""
_ESCAPED = "\\u00"
"""The first part of an escaped bracket: statistics are JSON in a string."""
_SIDECAR = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*\.parquet\Z")
_STATISTICS = "add.stats"
_SIDECAR_PATH = "sidecar.path"


class NotJsonError(OddFileError):
    """A line that is truncated or not UTF-8."""


def ensure_shallow_json(content: bytes, path: str) -> None:
    """Raise OddFileError for a commit that is nested too deep, or may be as it is not JSON."""
    if sum(map(content.count, (b"[", b"{", _ESCAPED.encode()))) > FEW_BRACKETS:
        for _ in _fields(content, path):
            pass


def ensure_shallow_checkpoint(content: bytes, path: str) -> set[str]:
    """Check a JSON checkpoint as a commit; return the names of its sidecars."""
    found = (v for kind, k, v in _fields(content, path) if (kind, k) == ("sidecar", "path"))
    return {_ensure_sidecar(name, path) for name in found}


def _fields(content: bytes, path: str) -> Iterator[tuple[str, str, object]]:
    """Yield kind, name and value of each action's fields, also of repeated names."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > MOST_LINE_BYTES:
            raise OddFileError(path, f"has a line of more than {MOST_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            text = line.decode()
            _ensure_shallow(text)
            found = json.loads(text, object_pairs_hook=tuple)
            for kind, action in found if isinstance(found, tuple) else ():
                for name, value in action if isinstance(action, tuple) else ():
                    if name == "stats" and isinstance(value, str):
                        _ensure_shallow(value)
                    yield kind, name, value
        except RecordError as error:
            raise OddFileError(path, f"is not a file of a log: line {number}: {error}") from None
        except (json.JSONDecodeError, UnicodeDecodeError):  # quotes values
            raise NotJsonError(path, f"is not a file of a log: line {number} is not JSON") from None
        except (ValueError, RecursionError):  # thousands of digits
            what = f"is not a file of a log: line {number} is not readable JSON"
            raise OddFileError(path, what) from None


def _ensure_shallow(text: str) -> None:
    """Raise RecordError."""
    if sum(map(text.count, ("[", "{"))) > FEW_BRACKETS:
        ensure_depth(text, MOST_DEPTH)


def ensure_shallow_parquet(source: pa.NativeFile, path: str, room: Room) -> set[str]:
    """Return the names of a checkpoint's sidecars. Raise OddFileError if it is nested too deep.

    It is also raised if its content is far larger than the file. `source`: the file at `path`. Its
    schema is limited by pyarrow.
    """
    names: set[str] = set()
    try:
        file = SizedCheckpoint(source, path, room)
        for texts in file.texts(_STATISTICS):
            _ensure_shallow_texts(texts)
        for texts in file.texts(_SIDECAR_PATH):
            names |= {_ensure_sidecar(name, path) for name in texts.drop_null().to_pylist()}
    except RecordError as error:
        raise OddFileError(path, f"is not a checkpoint: its statistics: {error}") from None
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = "is not a checkpoint: it is damaged, or its schema is nested too deep"
        raise OddFileError(path, what) from error
    return names


def _ensure_shallow_texts(texts: pa.Array) -> None:
    """Raise RecordError."""
    for text in texts.filter(pc.greater(pc.binary_length(texts), FEW_BRACKETS)).to_pylist():
        _ensure_shallow(text)


def _ensure_sidecar(name: object, path: str) -> str:
    if not isinstance(name, str) or not _SIDECAR.match(name):
        raise OddFileError(path, "names a file outside of its log as a part of it")
    return name
