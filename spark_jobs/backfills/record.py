"""What is kept of a backfill until its rows are committed, in the raw table's folder.

    _backfill/0001-5f2c.../plan.json                   made before the first split is read
    _backfill/0001-5f2c.../split-000012-9ab0....json   a note: its files are durable

A run that goes on with what another left makes a plan of its own, with the notes that it takes.
Only the last plan and the notes beside it count: tasks of a driver that is gone may still write.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from ingestd.lake.raw_table import RowRange, raw_schema
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import Table
from ingestd.ports import Fragment

FOLDER = "_backfill"
_PLAN = "plan.json"
_NOTE = "split-"
LOOKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Note:
    """A split that was read at `point`: its files, with how many rows and Arrow bytes."""

    split: int
    point: Lsn
    at: datetime
    rows: int
    nbytes: int
    fragments: tuple[Fragment, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self) | {"point": str(self.point), "at": self.at.isoformat()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Note:
        """Read what `to_json` gave. Raises ValueError, KeyError, TypeError."""
        return cls(
            split=found["split"],
            point=Lsn.parse(found["point"]),
            at=datetime.fromisoformat(found["at"]),
            rows=found["rows"],
            nbytes=found["nbytes"],
            fragments=tuple(Fragment(**f) for f in found["fragments"]),
        )

    @property
    def held(self) -> RowRange:
        """What its files add to the lake."""
        return RowRange(self.rows, self.point, self.point, self.at)


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """`Split.where` of a split, and its estimated bytes."""

    where: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One table's backfill by one run, and what it goes on with.

    `run`: its folder below FOLDER. `definition`: of the table, see `definition_of`. `origin`,
    `epoch`, `position`, `watermark` (of the table): of the lake when the first run began; the rows
    are of the epoch after that. `point`, `at`: of the first run's snapshot: the place of the `t`.
    `marker`: the file that has it. `taken`: notes of earlier runs.
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
        """Up to where the lake had all changes of the table before."""
        return max(self.watermark or ZERO, self.position or ZERO)

    def continued(self, taken: Collection[Note]) -> Plan:
        """Return the plan of a run that goes on with what these notes tell."""
        number = int(self.run.partition("-")[0]) + 1
        return replace(self, run=run_name(number), taken=tuple(taken))

    def to_text(self) -> str:
        """Write it as JSON."""
        found = asdict(self) | {
            "position": _text_of(self.position),
            "watermark": _text_of(self.watermark),
            "point": str(self.point),
            "at": self.at.isoformat(),
            "taken": [note.to_json() for note in self.taken],
        }
        return json.dumps(found, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read what `to_text` wrote. Raises ValueError, KeyError, TypeError for anything else."""
        found = json.loads(text)
        return cls(
            run=found["run"],
            definition=found["definition"],
            origin=found["origin"],
            epoch=found["epoch"],
            position=_position_of(found["position"]),
            watermark=_position_of(found["watermark"]),
            point=Lsn.parse(found["point"]),
            at=datetime.fromisoformat(found["at"]),
            marker=Fragment(**found["marker"]),
            splits=tuple(PlannedSplit(**split) for split in found["splits"]),
            taken=tuple(map(Note.from_json, found["taken"])),
        )


def _text_of(position: Lsn | None) -> str | None:
    return None if position is None else str(position)


def _position_of(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def run_name(number: int) -> str:
    """Name a run: the number orders those of a table."""
    return f"{number:04}-{uuid.uuid4().hex}"


def definition_of(table: Table) -> str:
    """Return a digest of all that says what a table's rows are like in the lake."""
    masks = [
        None if c.mask is None else (c.mask.kind, hashlib.sha256(c.mask.key).hexdigest())
        for c in table.columns
    ]
    said = (
        table.oid,
        [(c.name, c.type_oid, c.typmod) for c in table.columns],
        masks,
        str(raw_schema(table)),
        table.identifying,
        table.row_filter,
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()


class Record:
    """The plans and notes of one table, whose raw table is in `folder`. All calls block.

    Raises what `storage_faults` makes of errors.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self.table_folder = folder
        self._folder = f"{folder}/{FOLDER}"

    def run_folder(self, run: str) -> str:
        """Where a run's plan and notes are."""
        return f"{self._folder}/{run}"

    def last_plan(self) -> Plan | None:
        """Return the plan of the last run that could write one."""
        with self._faults():
            for run in sorted(self._store.folders(self._folder), reverse=True):
                plan = self._plan(run)
                if plan is not None:
                    return plan
        return None

    def write_plan(self, plan: Plan) -> None:
        """Make a plan durable."""
        write_durably(self._store, self.run_folder(plan.run), _PLAN, plan.to_text())

    def notes(self, plan: Plan) -> dict[int, Note]:
        """Return the notes of a plan, by split: those that it took over, and its own run's."""
        found: dict[int, Note] = {}
        for note in self._all_notes(plan):
            found.setdefault(note.split, note)
        return found

    def with_files(self, notes: Mapping[int, Note]) -> dict[int, Note]:
        """Return the notes whose files are all there as they were written."""
        with self._faults(), ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
            found = pool.map(self._has_files, notes.values())
            return {number: notes[number] for number, has in zip(notes, found, strict=True) if has}

    def clear(self) -> None:
        """Remove all plans and notes."""
        with self._faults():
            self._store.remove_folder(self._folder)

    def discard(self, committed: Collection[str]) -> None:
        """Remove all plans and notes, and their files but those that are `committed`."""
        with self._faults():
            for run in self._store.folders(self._folder):
                plan = self._plan(run)
                if plan is not None:
                    self._discard(plan, committed)
        self.clear()

    def _discard(self, plan: Plan, committed: Collection[str]) -> None:
        fragments = [f for note in self._all_notes(plan) for f in note.fragments]
        for fragment in (plan.marker, *fragments):
            if fragment.path not in committed:
                self._store.remove(f"{self.table_folder}/{fragment.path}")

    def _plan(self, run: str) -> Plan | None:
        path = f"{self.run_folder(run)}/{_PLAN}"
        if self._store.size(path) is None:
            return None
        try:
            plan = Plan.parse(self._text(path))
        except (ValueError, KeyError, TypeError):  # a kill came while it was written
            return None
        return plan if plan.run == run else None

    def _all_notes(self, plan: Plan) -> list[Note]:
        """Return all there are, of one split too."""
        found = list(plan.taken)
        folder = self.run_folder(plan.run)
        with self._faults():
            for name in self._store.files(folder):
                note = self._note(f"{folder}/{name}") if name.startswith(_NOTE) else None
                if note is not None and note.split < len(plan.splits):
                    found.append(note)
        return found

    def _has_files(self, note: Note) -> bool:
        return all(
            self._store.size(f"{self.table_folder}/{f.path}") == f.size_bytes
            for f in note.fragments
        )

    def _note(self, path: str) -> Note | None:
        try:
            return Note.from_json(json.loads(self._text(path)))
        except (ValueError, KeyError, TypeError):  # a kill came while it was written
            return None

    def _faults(self) -> AbstractContextManager[None]:
        return storage_faults(self._store.uri(self._folder))

    def _text(self, path: str) -> str:
        with self._store.open(path) as file:
            return bytes(file.read()).decode(errors="replace")


def write_note(store: Store, run_folder: str, note: Note) -> None:
    """Make a note durable. Blocks. Two tasks that read one split write two."""
    name = f"{_NOTE}{note.split:06}-{uuid.uuid4().hex}.json"
    write_durably(store, run_folder, name, json.dumps(note.to_json(), ensure_ascii=False))


def write_durably(store: Store, folder: str, name: str, text: str) -> None:
    """Write a new file, durably. Blocks."""
    with storage_faults(store.uri(folder)):
        store.make_folder(folder)
        with store.create(f"{folder}/{name}") as file:
            file.write(text.encode())
        store.sync(folder, [name])
