"""A commit of a Delta log: parsed and checked, or written.

All code that reads commits goes through here. Anyone who can write to the lake controls the content
of a commit. So no field is trusted to have the type or size that the protocol demands until it was
checked here. A commit is parsed line by line, and only the fields that ingestd uses are kept: the
memory is that of one line and of the files that it names.

Source: Delta protocol, "Actions".
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from deltalake.transaction import AddAction

from ingestd import __version__
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.delta.log_nesting import MOST_LINE_BYTES, NotJsonError, ensure_shallow_json
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import Store
from ingestd.ports import Fragment

TOKEN = "ingestdCommit"  # noqa: S105 - a key in commitInfo
RESUME = "ingestdResume"
"""Key for the position from which the capture resumes once this commit is durable."""
WRITER = "ingestdWriter"
"""Key for the process that made the commit."""
FENCE = "ingestdFence"
"""Key of a fence: after this commit, writers that read the log before it can't commit (I5)."""
HOLDS = "ingestdHolds"
"""Key for the number of files and app transactions in the commit: detects a truncated commit."""

CONTENT = "ingestdContent"
"""Key for the digest of all rows of that version, of a reference table."""
COMPACTION = "ingestdCompaction"
"""Key for the token of a commit of maintenance."""
OPERATION, USER_METADATA = "operation", "userMetadata"
"""Keys of other writers, which the Spark jobs read."""
STAMPS = frozenset(
    {TOKEN, RESUME, WRITER, FENCE, HOLDS, CONTENT, COMPACTION, OPERATION, USER_METADATA}
)
"""The keys of commitInfo that are kept of a commit."""

MOST_LINES = 100_000
"""Maximum number of actions in a commit: twice what fits in MOST_COMMIT_BYTES at 0.7 kB a file."""
MOST_VALUES = 4_000_000
"""Maximum for a commit; an object or a list counts as eight, as it takes that much longer."""
OUR_APP_IDS = "ingestd/"
_NULL = type(None)
_Fields = Mapping[str, tuple[type, ...]]
_FILE: _Fields = {
    "path": (str,),
    "dataChange": (bool,),
    "stats": (str, _NULL),
    "tags": (dict, _NULL),
    "deletionVector": (dict, _NULL),
    "baseRowId": (int, _NULL),
    "defaultRowCommitVersion": (int, _NULL),
}
_VECTOR: _Fields = {
    "storageType": (str,),
    "pathOrInlineDv": (str,),
    "offset": (int, _NULL),
    "sizeInBytes": (int,),
    "cardinality": (int,),
}
_FIELDS: Mapping[str, _Fields] = {
    "add": {
        **_FILE,
        "partitionValues": (dict,),
        "size": (int,),
        "modificationTime": (int,),
        "clusteringProvider": (str, _NULL),
    },
    "remove": {
        **_FILE,
        "partitionValues": (dict, _NULL),
        "size": (int, _NULL),
        "deletionTimestamp": (int, _NULL),
        "extendedFileMetadata": (bool, _NULL),
    },
    "cdc": {"path": (str,), "dataChange": (bool, _NULL)},
    "txn": {"appId": (str,), "version": (int,), "lastUpdated": (int, _NULL)},
    "metaData": {"schemaString": (str,)},
    "protocol": {},
    "commitInfo": {},
    "sidecar": {"path": (str,)},
}
"""Types of the fields that ingestd uses, and of those that deltalake requires to have one.

deltalake reads metaData and protocol before the next append.
"""
_LONG = range(-(1 << 63), 1 << 63)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ROWS = range(1 << 40)
"""Numbers of rows that a file may claim; no sum of them exceeds 64 bits."""
_NUMBERS = frozenset({"_cdc_lsn", "_cdc_seq", "_cdc_epoch", "epoch"})
"""Columns whose bounds are compared."""


class CommitAuthor(Enum):
    """Who made a commit that stands where one of ours was expected, and what it changes."""

    OURS = auto()
    WITHOUT_DATA = auto()
    FENCE = auto()
    FOREIGN = auto()


@dataclass(frozen=True, slots=True)
class FileAction:
    """An `add`, `remove` or `cdc` action. `statistics_json`: only of an added file, or None."""

    kind: str
    path: str
    is_change: bool
    statistics_json: str | None
    has_deletion_vector: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The parts of a commit that ingestd uses.

    `stamps`: the texts in its commitInfo whose keys are in STAMPS; `app_ids`: those of its app
    transactions; `schema_json`: from its metaData, or None; `alters`: it has a metaData or
    protocol action.
    """

    files: tuple[FileAction, ...]
    app_ids: tuple[str, ...]
    stamps: Mapping[str, str]
    schema_json: str | None
    alters: bool

    @property
    def is_ours(self) -> bool:
        """Return whether ingestd made it."""
        return TOKEN in self.stamps

    @property
    def writer(self) -> str | None:
        """The process that made it; None if not made by ingestd."""
        return self.stamps.get(WRITER) or None

    @property
    def has_data(self) -> bool:
        """Return whether it changes rows, or carries an app transaction of a daemon."""
        is_changed = any(f.is_change for f in self.files if f.kind != "cdc")
        return is_changed or bool(self.own_app_ids())

    @property
    def is_foreign_change(self) -> bool:
        """Return whether it changes rows and was not made by ingestd."""
        return self.has_data and not self.is_ours

    def own_app_ids(self) -> list[str]:
        """Return the names of those app transactions that belong to a daemon."""
        return [name for name in self.app_ids if name.startswith(OUR_APP_IDS)]

    def added(self) -> Iterator[FileAction]:
        """Return the files that it adds."""
        return (f for f in self.files if f.kind == "add")

    def removed(self) -> Iterator[FileAction]:
        """Return the files that it removes."""
        return (f for f in self.files if f.kind == "remove")

    def judge(self, token: str) -> CommitAuthor:
        """Return who made the commit and whether it changed data."""
        if self.stamps.get(TOKEN) == token:
            return CommitAuthor.OURS
        if FENCE in self.stamps:
            return CommitAuthor.FENCE
        return CommitAuthor.FOREIGN if self.is_ours or self.has_data else CommitAuthor.WITHOUT_DATA

    def resume(self, app_id: str) -> str | None:
        """Return its resume text; None if it has no such app transaction."""
        return self.stamps.get(RESUME, "") if app_id in self.app_ids else None


def commit_path(folder: str, version: int) -> str:
    """Return the file of a commit of the table in `folder`."""
    return f"{folder}/_delta_log/{version:020}.json"


def read_commit(store: Store, folder: str, version: int) -> Commit:
    """Return a commit of the table in `folder`. Raise OddFileError, or as `Store.read` does."""
    path = commit_path(folder, version)
    return parse_commit(store.read(path, MOST_COMMIT_BYTES), store.uri(path))


def parse_commit(content: bytes, path: str) -> Commit:
    """Parse the content of the commit file at `path`. Raise OddFileError."""
    parsed = _Parsed(path)
    for line in _lines(content, path):
        parsed.add(line)
    return parsed.commit()


def is_complete_commit(content: bytes, path: str, *, makes_table: bool = False) -> bool:
    """Return whether the content is a complete commit, not one truncated by a power failure.

    A file whose content was not durable may end anywhere, also between two actions. `makes_table`:
    it is the first commit of a table. Content that no power failure produces, such as JSON that is
    no action, counts as complete: parsing it raises an error.
    """
    parsed = _Parsed(path)
    try:
        for line in _lines(content, path):
            parsed.add(line)
    except NotJsonError:
        return False
    except OddFileError:
        return True
    return parsed.is_complete(makes_table=makes_table)


def actions_in(content: bytes, path: str) -> list[dict[str, dict[str, Any]]]:
    """Return the actions of a commit, each by its kind, in order. Raise OddFileError.

    For readers that pass actions on, whose fields are more than `Commit` keeps.
    """
    lines = enumerate(_lines(content, path), 1)
    return [{k: action} for number, line in lines for k, action in _actions(line, number, path)]


def statistics_of(statistics_json: str | None) -> dict[str, Any]:
    """Return a file's statistics, empty if it has none; malformed entries are left out.

    A missing bound excludes nothing, so the file is read.
    """
    if not statistics_json:
        return {}
    try:
        return checked_statistics(json.loads(statistics_json))
    except (ValueError, RecursionError):
        return {}


def checked_statistics(statistics: object) -> dict[str, Any]:
    """Return these statistics without malformed entries."""
    if not isinstance(statistics, dict):
        return {}
    kept: dict[str, Any] = {}
    rows = statistics.get("numRecords")
    if _is_number(rows) and rows in _ROWS:
        kept["numRecords"] = rows
    for name in ("minValues", "maxValues", "nullCount"):
        bounds = statistics.get(name)
        if isinstance(bounds, dict):
            kept[name] = {k: v for k, v in bounds.items() if k not in _NUMBERS or _is_number(v)}
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- parsing ---------------------------------------------------------------------------------


class _Parsed:
    """Collects the actions of a commit."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._files: list[FileAction] = []
        self._app_ids: list[str] = []
        self._stamps: dict[str, str] = {}
        self._schema_json: str | None = None
        self._kinds: set[str] = set()

    def add(self, line: bytes) -> None:
        self._number += 1
        for kind, action in _actions(line, self._number, self._path):
            self._kinds.add(kind)
            if kind in {"add", "remove", "cdc"}:
                self._files.append(_file_action(kind, action))
            elif kind == "txn":
                self._app_ids.append(action["appId"])
            elif kind == "commitInfo":
                self._stamps |= {k: v for k in STAMPS if isinstance(v := action.get(k), str)}
            elif kind == "metaData":
                self._schema_json = action["schemaString"]

    def commit(self) -> Commit:
        return Commit(
            tuple(self._files),
            tuple(self._app_ids),
            self._stamps,
            self._schema_json,
            alters=not self._kinds.isdisjoint({"protocol", "metaData"}),
        )

    def is_complete(self, *, makes_table: bool) -> bool:
        if makes_table and not {"protocol", "metaData"} <= self._kinds:
            return False
        stated = self._stamps.get(HOLDS)
        held = len(self._app_ids) + sum(f.kind == "add" for f in self._files)
        return bool(self._number) and (stated is None or stated == str(held))


def _file_action(kind: str, action: Mapping[str, Any]) -> FileAction:
    return FileAction(
        kind,
        action["path"],
        is_change=action.get("dataChange") is not False,
        statistics_json=action.get("stats") if kind == "add" else None,
        has_deletion_vector=action.get("deletionVector") is not None,
    )


def _lines(content: bytes, path: str) -> Iterator[bytes]:
    """Yield the lines that are not blank; only a newline separates them."""
    values = content.count(b",") + 8 * (content.count(b"[") + content.count(b"{"))
    if values > MOST_VALUES:
        raise OddFileError(path, f"has {values} values, more than {MOST_VALUES}")
    ensure_shallow_json(content, path)
    at, count = 0, 0
    while at < len(content):
        end = content.find(b"\n", at)
        end = len(content) if end < 0 else end
        if end - at > MOST_LINE_BYTES:
            raise OddFileError(path, f"has a line of more than {MOST_LINE_BYTES} bytes")
        line = content[at:end]
        at = end + 1
        if not line.isspace() and line:
            count += 1
            if count > MOST_LINES:
                raise OddFileError(path, f"has more than {MOST_LINES} actions")
            yield line


def _actions(line: bytes, number: int, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the actions in a line with their kind: usually one, but a writer may add null ones."""
    what = f"is not a commit of a Delta log: line {number}"
    found = _json(line, what, path)
    if not isinstance(found, dict):
        raise OddFileError(path, f"{what} is not a JSON object")
    for kind, action in found.items():
        fields = _FIELDS.get(kind)
        if action is None or fields is None:
            continue
        if not isinstance(action, dict):
            raise OddFileError(path, f"{what}: {kind} is not an object")
        odd = _odd_field(action, fields)
        if odd is None and (vector := action.get("deletionVector")) is not None:
            odd = _odd_field(vector, _VECTOR)
        if odd is not None:
            raise OddFileError(path, f"{what}: {kind}.{odd} has the wrong type")
        yield kind, action


def _odd_field(action: Mapping[str, object], fields: _Fields) -> str | None:
    return next((n for n, types in fields.items() if not _has_type(action.get(n), types)), None)


def _has_type(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) and (not isinstance(value, int) or value in _LONG)


def _json(line: bytes, what: str, path: str) -> object:
    """Return the value of a line; refuse JSON that not every reader accepts."""
    try:
        found = json.loads(line.decode(), parse_constant=_refuse_constant)
        if _SURROGATE.search(line):
            json.dumps(found, ensure_ascii=False).encode()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotJsonError(path, f"{what} is not JSON") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or half a surrogate pair
        raise OddFileError(path, f"{what} is not readable JSON") from error
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN, Infinity


# --- written -------------------------------------------------------------------------------


def commit_text(
    fragments: Sequence[Fragment],
    stamps: Mapping[str, str],
    transactions: Sequence[tuple[str, int]],
) -> bytes:
    """Return a commit that adds files; `transactions`: app transactions, name and version."""
    stamps = {**stamps, HOLDS: str(len(fragments) + len(transactions))}
    actions = [_info("WRITE", {"mode": "Append", "partitionBy": "[]"}, stamps)]
    actions += ({"txn": {"appId": app_id, "version": number}} for app_id, number in transactions)
    actions += (_add(f, is_change=True) for f in fragments)
    return _joined(actions)


def rewrite_text(
    fragments: Sequence[Fragment], removed: Mapping[str, int], stamps: Mapping[str, str]
) -> bytes:
    """Return a commit that replaces files (path, bytes) by others with the same rows."""
    now_ms = time.time_ns() // 1_000_000
    stamps = {**stamps, HOLDS: str(len(fragments))}
    actions = [_info("OPTIMIZE", {"predicate": "[]"}, stamps)]
    actions += (
        {
            "remove": {
                "path": path,
                "deletionTimestamp": now_ms,
                "dataChange": False,
                "extendedFileMetadata": True,
                "partitionValues": {},
                "size": nbytes,
            }
        }
        for path, nbytes in removed.items()
    )
    actions += (_add(f, is_change=False) for f in fragments)
    return _joined(actions)


def _info(
    operation: str, parameters: Mapping[str, str], stamps: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "commitInfo": {
            "timestamp": time.time_ns() // 1_000_000,
            "operation": operation,
            "operationParameters": parameters,
            "engineInfo": f"ingestd/{__version__}",
            **stamps,
        }
    }


def add_action(fragment: Fragment, *, is_change: bool = True) -> AddAction:
    """Return the action that adds a file. `is_change`: with rows that the table did not have."""
    return AddAction(
        path=fragment.path,
        size=fragment.size_bytes,
        partition_values={},
        modification_time=fragment.modification_time_ms,
        data_change=is_change,
        stats=fragment.statistics,
    )


def _add(fragment: Fragment, *, is_change: bool) -> dict[str, Any]:
    return {
        "add": {
            "path": fragment.path,
            "partitionValues": {},
            "size": fragment.size_bytes,
            "modificationTime": fragment.modification_time_ms,
            "dataChange": is_change,
            "stats": fragment.statistics,
        }
    }


def _joined(actions: Sequence[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(action, separators=(",", ":")) for action in actions)
    return "".join(f"{line}\n" for line in lines).encode()
