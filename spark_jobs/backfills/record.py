"""The plan and notes of a backfill, kept in the raw table's folder until its rows are committed.

    _backfill/0001-5f2c.../plan.json                   written before the first split is read
    _backfill/0001-5f2c.../split-000012-9ab0....json   a note: its files are durable

A run that resumes another writes its own plan, which includes the notes that it takes over.
Only the last plan and the notes next to it count: tasks of a dead driver may still write.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import uuid
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from ingestd.lake.delta.log_paths import OWN_FILE
from ingestd.lake.raw_table import RowRange, raw_schema
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store
from ingestd.model.errors import OperatorError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.recorded import Recorded, RecordError, TruncatedRecordError, read_json
from ingestd.model.schema import Table
from ingestd.ports import Fragment

FOLDER = "_backfill"
_PLAN = "plan.json"
_NOTE = "split-"
LOOKS_AT_ONCE = 16
MOST_BYTES = 64 << 20
"""Of a plan, and of all notes of a run together. What they name must fit into one commit, which has
at most half of that (`ingestd.lake.delta.log_files`)."""
_MOST_VALUES = MOST_BYTES // 12
"""More than a text of that size has, if a plan or note is in it."""
_RUN = re.compile(r"(?!9{9})([0-9]{4,9})-[0-9a-z]+\Z")
"""Name of a run; the highest number is left out, as none could follow it."""
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Note:
    """A split that was read at `point`: its files, rows and Arrow bytes."""

    split: int
    point: Lsn
    at: datetime
    rows: int
    nbytes: int
    fragments: tuple[Fragment, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the note as a JSON object."""
        return asdict(self) | {
            "point": str(self.point),
            "at": self.at.isoformat(),
            "fragments": [_fragment_to_json(fragment) for fragment in self.fragments],
        }

    @classmethod
    def parse(cls, found: Recorded) -> Note:
        """Return the note that `to_json` wrote. Raise RecordError.

        It names only files that ingestd could have made in the table's folder.
        """
        return cls(
            split=found.field("split").integer(),
            point=found.field("point").position(),
            at=found.field("at").instant(),
            rows=found.field("rows").integer(),
            nbytes=found.field("nbytes").integer(),
            fragments=tuple(map(_fragment, found.field("fragments").items())),
        )

    @property
    def row_range(self) -> RowRange:
        """The row range that its files add to the lake."""
        return RowRange(self.rows, self.point, self.point, self.at)


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """`Split.where` of a split, and its estimated bytes."""

    where: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One table's backfill by one run, including what it took over from earlier runs.

    `run`: its folder below FOLDER. `definition`: the table's `definition_of`. `origin`, `epoch`,
    `position` and the table's `watermark` are the lake's when the first run began; the rows belong
    to the next epoch. `point` and `at` are those of the first run's snapshot, and the position of
    the `t`. `marker`: the file that holds the `t`. `taken`: notes of earlier runs.
    """

    run: str
    definition: str
    origin: str
    epoch: int
    position: Lsn | None
    watermark: Lsn | None
    point: Lsn
    at: datetime
    marker: Fragment
    splits: tuple[PlannedSplit, ...]
    taken: tuple[Note, ...] = ()

    @property
    def complete_to(self) -> Lsn:
        """The position up to which the lake already had all changes of the table."""
        return max(self.watermark or ZERO, self.position or ZERO)

    def continued(self, taken: Collection[Note]) -> Plan:
        """Return the plan of a run that takes over these notes."""
        number = int(self.run.partition("-")[0]) + 1
        return replace(self, run=run_name(number), taken=tuple(taken))

    def to_text(self) -> str:
        """Return the plan as JSON."""
        found = asdict(self) | {
            "position": _text_of(self.position),
            "watermark": _text_of(self.watermark),
            "point": str(self.point),
            "at": self.at.isoformat(),
            "marker": _fragment_to_json(self.marker),
            "taken": [note.to_json() for note in self.taken],
        }
        return json.dumps(found, ensure_ascii=False)

    @classmethod
    def parse(cls, found: Recorded) -> Plan:
        """Return the plan that `to_text` wrote. Raise RecordError.

        It names only files that ingestd could have made in the table's folder.
        """
        plan = cls(
            run=found.field("run").text(),
            definition=found.field("definition").text(),
            origin=found.field("origin").text(),
            epoch=found.field("epoch").integer(),
            position=_position_or_none(found, "position"),
            watermark=_position_or_none(found, "watermark"),
            point=found.field("point").position(),
            at=found.field("at").instant(),
            marker=_fragment(found.field("marker")),
            splits=tuple(
                PlannedSplit(split.field("where").text(), split.field("nbytes").integer())
                for split in found.field("splits").items()
            ),
            taken=tuple(map(Note.parse, found.field("taken").items())),
        )
        _ensure(_RUN.match(plan.run), "its run has no such name")
        _ensure(all(n.split < len(plan.splits) for n in plan.taken), "a split is missing")
        return plan


def _text_of(position: Lsn | None) -> str | None:
    return None if position is None else str(position)


def _position_or_none(recorded: Recorded, name: str) -> Lsn | None:
    _ensure(name in recorded.fields(), f'"{name}" is missing')
    field = recorded.field(name)
    return None if field.is_null else field.position()


def _ensure(is_so: object, why: str) -> None:
    if not is_so:
        raise RecordError(why)


def _fragment_to_json(fragment: Fragment) -> dict[str, Any]:
    """Return the fragment that `_fragment` reads."""
    return {
        "path": fragment.path,
        "size_bytes": fragment.size_bytes,
        "rows": fragment.rows,
        "stats_json": fragment.statistics,
        "modification_time_ms": fragment.modification_time_ms,
    }


def _fragment(recorded: Recorded) -> Fragment:
    path = recorded.field("path").text()
    _ensure(OWN_FILE.match(path), f"ingestd makes no file {path!a}")
    return Fragment(
        path,
        recorded.field("size_bytes").integer(),
        recorded.field("rows").integer(),
        recorded.field("stats_json").text(),
        recorded.field("modification_time_ms").integer(),
    )


def _number_of(run: str) -> tuple[int, str]:
    """Return the order of runs: as numbers, not as texts; folders with other names come first."""
    found = _RUN.match(run)
    return int(found[1]) if found else -1, run


def run_name(number: int) -> str:
    """Return a new name for a run. The number orders the runs of a table."""
    return f"{number:04}-{uuid.uuid4().hex}"


def definition_of(table: Table) -> str:
    """Return a digest of everything that determines a table's rows in the lake."""
    masks = [
        None if c.mask is None else (c.mask.kind, hashlib.sha256(c.mask.key).hexdigest())
        for c in table.columns
    ]
    described = (
        table.oid,
        [(c.name, c.type_oid, c.typmod) for c in table.columns],
        masks,
        str(raw_schema(table)),
        table.identifying,
        table.row_filter,
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


class Record:
    """The plans and notes of one table. `folder`: of its raw table. All calls block.

    `most_bytes`: of a plan, and of all notes of a run together.

    Every writer of the lake can write these files. So all are checked before the first file that
    they name is opened or removed. A truncated file does not count: its writer was killed. For any
    other that this module can't have written, raises OperatorError, and removes nothing. Otherwise
    raises the errors that `storage_faults` maps to.
    """

    def __init__(self, store: Store, folder: str, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._store = store
        self.table_folder = folder
        self._folder = f"{folder}/{FOLDER}"

    def run_folder(self, run: str) -> str:
        """Return the folder of a run's plan and notes."""
        return f"{self._folder}/{run}"

    def last_plan(self) -> Plan | None:
        """Return the plan of the last run that wrote one completely; None without one."""
        with self._faults():
            for run in sorted(self._store.folders(self._folder), key=_number_of, reverse=True):
                plan = self._plan(run)
                if plan is not None:
                    return plan
        return None

    def write_plan(self, plan: Plan) -> None:
        """Write a plan durably."""
        write_durably(self._store, self.run_folder(plan.run), _PLAN, plan.to_text())

    def notes(self, plan: Plan) -> dict[int, Note]:
        """Return the notes of a plan by split: those it took over, and its run's own."""
        found: dict[int, Note] = {}
        for note in self._all_notes(plan):
            found.setdefault(note.split, note)
        return found

    def with_files(self, notes: Mapping[int, Note]) -> dict[int, Note]:
        """Return the notes whose files all exist with their recorded size."""
        with self._faults(), ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
            found = pool.map(self._has_files, notes.values())
            return {number: notes[number] for number, has in zip(notes, found, strict=True) if has}

    def clear(self) -> None:
        """Remove all plans and notes."""
        with self._faults():
            self._store.remove_folder(self._folder)

    def discard(self, committed: Collection[str]) -> None:
        """Remove all plans and notes, and their files except those in `committed`."""
        with self._faults():
            plans = [self._plan(run) for run in self._store.folders(self._folder)]
            files = {path for plan in plans if plan is not None for path in self._files_of(plan)}
            for path in files.difference(committed):
                self._store.remove(f"{self.table_folder}/{path}")
        self.clear()

    def _files_of(self, plan: Plan) -> set[str]:
        notes = self._all_notes(plan)
        return {plan.marker.path, *(f.path for note in notes for f in note.fragments)}

    def _plan(self, run: str) -> Plan | None:
        path = f"{self.run_folder(run)}/{_PLAN}"
        if self._store.size(path) is None:
            return None
        with self._sense_of(path):
            found = _parsed(self._store.read(path, self._most_bytes))
            if found is None:
                return None
            plan = Plan.parse(found)
            _ensure(plan.run == run, "it is of another run")
            return plan

    def _all_notes(self, plan: Plan) -> list[Note]:
        """Return all notes of a plan; a split may have several."""
        found = list(plan.taken)
        folder = self.run_folder(plan.run)
        left = self._most_bytes
        with self._faults():
            for name in self._store.files(folder):
                if not name.startswith(_NOTE):
                    continue
                with self._sense_of(f"{folder}/{name}"):
                    content = self._store.read(f"{folder}/{name}", left)
                    left -= len(content)
                    parsed = _parsed(content)
                    if parsed is None:
                        continue
                    note = Note.parse(parsed)
                    _ensure(note.split < len(plan.splits), "the plan has no such split")
                    found.append(note)
        return found

    def _has_files(self, note: Note) -> bool:
        return all(
            self._store.size(f"{self.table_folder}/{f.path}") == f.size_bytes
            for f in note.fragments
        )

    @contextmanager
    def _sense_of(self, path: str) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            why = str(error)[:_SHOWN]
            uri = self._store.uri(self._folder)
            away = f'mv {shlex.quote(uri)} "$(mktemp -d)"' if self._store.syncs else f"move {uri}"
            raise OperatorError(
                f"lake {self._store.uri(path)}: no backfill wrote this: {why!a}; nothing was"
                " removed",
                remedy=f"move the folder away, and run this again: {away}",
            ) from error

    def _faults(self) -> AbstractContextManager[None]:
        return storage_faults(self._store.uri(self._folder))


def _parsed(content: bytes) -> Recorded | None:
    """Return a file's content; None if it is truncated. Raise RecordError."""
    try:
        return read_json(content, MOST_BYTES, _MOST_VALUES)
    except TruncatedRecordError:
        return None


def write_note(store: Store, run_folder: str, note: Note) -> None:
    """Write a note durably. Blocks. If two tasks read the same split, each writes its own note."""
    name = f"{_NOTE}{note.split:06}-{uuid.uuid4().hex}.json"
    write_durably(store, run_folder, name, json.dumps(note.to_json(), ensure_ascii=False))


def write_durably(store: Store, folder: str, name: str, text: str) -> None:
    """Write a new file durably. Blocks."""
    with storage_faults(store.uri(folder)):
        store.make_folder(folder)
        with store.create(f"{folder}/{name}") as file:
            file.write(text.encode())
        store.sync(folder, [name])
