"""A commit of a Delta log, read and checked: the one way from its bytes to its actions.

Whoever can write into the lake decides what is in a commit, so that nothing in it has the type or
the size that the protocol says until it was checked here. A commit is parsed a line at a time, and
only what ingestd uses is kept: the memory is that of one line and of the files that it names.

Source: Delta protocol, "Actions".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ingestd.lake.delta.actions import FENCE, HOLDS, RESUME, TOKEN, WRITER
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.store.plain_files import OddFileError
from ingestd.lake.store.store import Store

MOST_LINES = 100_000
"""Actions of a commit: with 0.7 kB a file, twice what MOST_COMMIT_BYTES has room for."""
MOST_LINE_BYTES = 4 << 20
"""Of one action: the metadata of 1,600 columns has 0.9 MB."""
OUR_APP_IDS = "ingestd/"
_NUMBERS = frozenset({"_cdc_lsn", "_cdc_seq", "_cdc_epoch", "epoch"})
"""Columns whose bounds are compared."""


class Interposed(Enum):
    """What a commit that is not the expected one turns out to be."""

    OURS = auto()
    WITHOUT_DATA = auto()
    FENCE = auto()
    FOREIGN = auto()


@dataclass(frozen=True, slots=True)
class FileAction:
    """An `add`, `remove` or `cdc` action. `statistics_json`: of an added file, None without."""

    kind: str
    path: str
    is_change: bool
    statistics_json: str | None
    has_deletion_vector: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """What ingestd uses of a commit.

    `stamps`: the texts in its commitInfo, by key; `app_ids`: of its app transactions;
    `schema_json`: of its metaData, None without; `alters`: it has metaData or a protocol.
    """

    files: tuple[FileAction, ...]
    app_ids: tuple[str, ...]
    stamps: Mapping[str, str]
    schema_json: str | None
    alters: bool

    @property
    def is_ours(self) -> bool:
        """Whether a program of ours made it."""
        return TOKEN in self.stamps

    @property
    def writer(self) -> str | None:
        """The process that made it; None if it was none of ours."""
        return self.stamps.get(WRITER) or None

    @property
    def has_data(self) -> bool:
        """Whether it changes rows, or carries an app transaction of a daemon."""
        is_changed = any(f.is_change for f in self.files if f.kind != "cdc")
        return is_changed or any(name.startswith(OUR_APP_IDS) for name in self.app_ids)

    @property
    def is_foreign_change(self) -> bool:
        """Whether it changes rows, and no program of ours made it."""
        return self.has_data and not self.is_ours

    def added(self) -> Iterator[FileAction]:
        """Return the files that it adds."""
        return (f for f in self.files if f.kind == "add")

    def removed(self) -> Iterator[FileAction]:
        """Return the files that it removes."""
        return (f for f in self.files if f.kind == "remove")

    def judge(self, token: str) -> Interposed:
        """Return whose it is, and whether it changed data."""
        if self.stamps.get(TOKEN) == token:
            return Interposed.OURS
        if FENCE in self.stamps:
            return Interposed.FENCE
        return Interposed.FOREIGN if self.is_ours or self.has_data else Interposed.WITHOUT_DATA

    def resume(self, app_id: str) -> str | None:
        """Return the text that it carries; None if it has no such app transaction."""
        return self.stamps.get(RESUME, "") if app_id in self.app_ids else None


def commit_path(folder: str, version: int) -> str:
    """Return the file of a commit of the table in `folder`."""
    return f"{folder}/_delta_log/{version:020}.json"


def read_commit(store: Store, folder: str, version: int) -> Commit:
    """Return a commit of the table in `folder`. Raises OddFileError, and what `Store.read` does."""
    path = commit_path(folder, version)
    return parse_commit(store.read(path, MOST_COMMIT_BYTES), store.uri(path))


def parse_commit(content: bytes, path: str) -> Commit:
    """Return a commit as the file at `path` has it. Raises OddFileError."""
    parsed = _Parsed(path)
    for line in _lines(content, path):
        parsed.add(line)
    return parsed.commit()


def is_whole(content: bytes, path: str, *, makes_table: bool = False) -> bool:
    """Return whether it is a commit, and not what a power cut left of one.

    A file whose content was not durable may be cut anywhere, between two actions too.
    `makes_table`: it is the first of a table. What no power cut leaves, such as JSON that is no
    action, is complete: it is refused by whoever reads it.
    """
    parsed = _Parsed(path)
    try:
        for line in _lines(content, path):
            parsed.add(line)
    except _NotJsonError:
        return False
    except OddFileError:
        return True
    return parsed.is_complete(makes_table=makes_table)


def sidecars_in(content: bytes, path: str) -> Iterator[str]:
    """Return the paths of the sidecars that a checkpoint in JSON names. Raises OddFileError."""
    for number, line in enumerate(_lines(content, path), 1):
        action = _action(line, number, path).get("sidecar")
        if action is not None:
            yield _Line(number, path).text(action, "sidecar", "path")


def statistics_of(statistics_json: str | None) -> dict[str, Any]:
    """Return a file's statistics, empty without; what is not as Delta has it is left out.

    A bound that is missing is one that says nothing: the file is read.
    """
    if not statistics_json:
        return {}
    try:
        return checked_statistics(json.loads(statistics_json))
    except (ValueError, RecursionError):
        return {}


def checked_statistics(found: object) -> dict[str, Any]:
    """Return these statistics without what is not as Delta has it."""
    if not isinstance(found, dict):
        return {}
    kept: dict[str, Any] = {}
    rows = found.get("numRecords")
    if isinstance(rows, int) and rows >= 0:
        kept["numRecords"] = rows
    for name in ("minValues", "maxValues"):
        bounds = found.get(name)
        if isinstance(bounds, dict):
            kept[name] = {k: v for k, v in bounds.items() if k not in _NUMBERS or _is_number(v)}
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- parsing ---------------------------------------------------------------------------------


class _NotJsonError(OddFileError):
    """A line that ends too early, or has other bytes than text."""


class _Parsed:
    """The actions of a commit, as they are read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._files: list[FileAction] = []
        self._app_ids: list[str] = []
        self._stamps: dict[str, str] = {}
        self._schema_json: str | None = None
        self._kinds: set[str] = set()

    def add(self, content: bytes) -> None:
        self._number += 1
        line = _Line(self._number, self._path)
        for kind, action in _action(content, self._number, self._path).items():
            if action is None:  # a writer may name all kinds, and leave the others null
                continue
            self._kinds.add(kind)
            if kind in {"add", "remove", "cdc"}:
                self._files.append(line.file(kind, action))
            elif kind == "txn":
                self._app_ids.append(line.text(action, kind, "appId"))
            elif kind == "commitInfo":
                stamps = line.dictionary(action, kind).items()
                self._stamps |= {k: v for k, v in stamps if isinstance(v, str)}
            elif kind == "metaData":
                self._schema_json = line.text(action, kind, "schemaString")

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


@dataclass(frozen=True, slots=True)
class _Line:
    """Takes values out of an action. Raises OddFileError for what is not of its type."""

    number: int
    path: str

    def dictionary(self, value: object, name: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        raise self._refusal(name, "is no object")

    def text(self, action: object, kind: str, name: str) -> str:
        value = self.dictionary(action, kind).get(name)
        if isinstance(value, str):
            return value
        raise self._refusal(f"{kind}.{name}", "is no string")

    def file(self, kind: str, action: object) -> FileAction:
        path = self.text(action, kind, "path")
        found = self.dictionary(action, kind)
        is_change = found.get("dataChange")
        if not isinstance(is_change, bool | None):
            raise self._refusal(f"{kind}.dataChange", "is no boolean")
        statistics = found.get("stats") if kind == "add" else None
        if not isinstance(statistics, str | None):
            raise self._refusal(f"{kind}.stats", "is no string")
        has_vector = found.get("deletionVector") is not None
        return FileAction(kind, path, is_change is not False, statistics, has_vector)

    def _refusal(self, name: str, why: str) -> OddFileError:
        return OddFileError(
            self.path, f"is no commit of a Delta log: line {self.number}: {name} {why}"
        )


def _lines(content: bytes, path: str) -> Iterator[bytes]:
    """Return the lines that are not blank; whatever separators of lines are in a value."""
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


def _action(line: bytes, number: int, path: str) -> dict[str, Any]:
    """Return the JSON object in a line."""
    what = f"is no commit of a Delta log: line {number}"
    try:
        found = json.loads(line.decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _NotJsonError(path, f"{what} is no JSON") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, for one
        raise OddFileError(path, f"{what} is no JSON that can be read") from error
    if isinstance(found, dict):
        return found
    raise OddFileError(path, f"{what} is no object")
