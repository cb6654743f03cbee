"""The files of a raw table that count at a cut, and what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.digests.value_hashes import Hashes
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import list_files
from ingestd.lake.delta.tail import File
from ingestd.lake.fold.raw_texts import NAMES_TYPE
from ingestd.lake.layout import Layout
from ingestd.lake.reference.raw_changes import (
    POSITION,
    KeepGroup,
    Position,
    epochs_of,
    highest,
    key_hashes,
    read_changes,
)
from ingestd.lake.store.errors import table_fault
from ingestd.lake.store.store import Store
from ingestd.model.changes import DELETE, INSERT, SNAPSHOT, TRUNCATE, UPDATE, field_of
from ingestd.model.errors import DamagedError, FolderError
from ingestd.model.schema import TableId
from ingestd.reading.output_columns import RowShape

ChosenFile = tuple[File, KeepGroup | None]
"""A file, and which of its row groups are read (None: all)."""
_OPERATIONS = {SNAPSHOT, INSERT, UPDATE, DELETE, TRUNCATE}
BEGINNING: Position = (-1, -2)
"""Below every position."""
_EPOCH = pa.schema([("_cdc_epoch", pa.int64())])
_RELEASED_EVERY = 8
"""Batches after which memory that was allocated for them and freed is returned to the system."""


@dataclass(slots=True)
class RawSurvey:
    """What the files of a raw table contain, up to an epoch.

    `rows`: their number. `marker`: position of the newest `t`. `changed_to`: highest position of a
    row that is neither `r` nor `t`. `read_at`: `_cdc_lsn` of the `r` rows. `unsent`: lake columns
    that some update did not send.
    """

    rows: int = 0
    marker: Position = BEGINNING
    changed_to: Position = BEGINNING
    read_at: set[int] = field(default_factory=set)
    unsent: set[str] = field(default_factory=set)

    @property
    def is_one_snapshot(self) -> bool:
        """Return whether all rows above the marker are one snapshot: one complete row per key."""
        read_at = [lsn for lsn in self.read_at if (lsn, 0) > self.marker]
        return self.changed_to < self.marker and len(read_at) <= 1


class RawFiles:
    """A raw table at its newest version, from above an epoch up to another. Reads only; blocks.

    Raise TableError for a fault of the table's folder, and else as `storage_faults` does.
    """

    def __init__(
        self, store: Store, source: str, table: TableId, epoch: int, after: int = 0
    ) -> None:
        layout = Layout(source)
        self._source, self._table, self._epoch, self._after = source, table, epoch, after
        self._log = TableLog(store, layout.raw(table), layout.app_id(table))
        self.files: Sequence[File] = ()
        with self.faults():
            self._log.load()
            if self._log.exists:
                self._log.ensure_fields(POSITION)
                files = [(path, stats) for path, stats, _ in list_files(self._log.handle)]
                self.files = [f for f in files if _overlaps(epochs_of(f[1]), after, epoch)]

    @property
    def uri(self) -> str:
        """The raw table's location."""
        return self._log.uri

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Raise a fault of the raw table's folder as the table's own."""
        try:
            yield
        except FolderError as error:
            raise table_fault(error, self._source, self._table, self._log.uri) from error

    def survey(self) -> RawSurvey:
        """Return what the files contain. Files that have only `r` rows are not opened."""
        found = RawSurvey()
        wanted = pa.schema([*POSITION, ("_cdc_unchanged", NAMES_TYPE)])
        with self.faults():
            for file in self.files:
                first, last = epochs_of(file[1])
                if _is_one_read(file) and self._after < first and last <= self._epoch:
                    found.rows += file[1]["numRecords"]
                    found.read_at.add(file[1]["minValues"]["_cdc_lsn"])
                    continue
                for rows in self._read(file, wanted):
                    _ensure_positions(rows)
                    _survey_rows(found, rows)
        return found

    def _read(
        self,
        file: File,
        schema: pa.Schema,
        above: Position | None = None,
        keep: KeepGroup | None = None,
    ) -> Iterator[pa.Table]:
        return read_changes(
            self._log, file, schema, self._epoch, above, after=self._after, keep=keep
        )

    def rows_by_epoch(self) -> Mapping[int, int]:
        """Return the number of rows of each epoch."""
        found = Counter[int]()
        with self.faults():
            for file in self.files:
                first, last = epochs_of(file[1])
                if first == last and file[1].get("numRecords") is not None:
                    found[first] += file[1]["numRecords"]
                    continue
                for rows in self._read(file, _EPOCH):
                    for each in rows["_cdc_epoch"].value_counts().to_pylist():
                        found[each["values"]] += each["counts"]
        return found

    def links(self, shape: RowShape, marker: Position, unsent: Collection[str]) -> list[Hashes]:
        """Return the keys, new and old, of updates that changed a key and did not send every value.

        They are hashes: an array of two rows for each batch. `unsent`: the lake columns that some
        update did not send.
        """
        wanted = {shape.new_name(name) for name in unsent} - {None, *shape.key}
        found: list[Hashes] = []
        if not shape.key or not wanted:
            return found
        narrow = RowShape(tuple(c for c in shape.columns if c.name in shape.key), shape.key)
        files = [(file, None) for file in self.files if not has_only_reads(file)]
        for rows in self._raw_rows(narrow, files, _above(marker)):
            is_moved = pc.and_(rows["_cdc_before"].is_valid(), rows["_cdc_unchanged"].is_valid())
            moved = rows.filter(pc.and_(is_moved, pc.equal(rows["_cdc_op"], UPDATE)))
            if moved.num_rows:
                keys = narrow.convert(moved)
                keys = keys.filter(changes_key(keys, shape.key))
                both = keys.select(list(shape.key)), old_keys(keys, shape.key)
                found.append(np.stack([key_hashes(each, shape.key) for each in both]))
        return found

    def changes(
        self, shape: RowShape, marker: Position, files: Sequence[ChosenFile] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows above the marker, converted, without `t`. `files`: all by default."""
        for rows in self._raw_rows(shape, files, _above(marker)):
            kept = rows.filter(pc.not_equal(rows["_cdc_op"], TRUNCATE))
            if kept.num_rows:
                yield shape.convert(kept)

    def change_rows(self, shape: RowShape) -> Iterator[pa.Table]:
        """Yield all rows, converted."""
        for rows in self._raw_rows(shape):
            if rows.num_rows:
                yield shape.convert(rows)

    def _raw_rows(
        self,
        shape: RowShape,
        files: Sequence[ChosenFile] | None = None,
        above: Position | None = None,
    ) -> Iterator[pa.Table]:
        chosen = [(file, None) for file in self.files] if files is None else files
        with self.faults():
            for file, keep in chosen:
                batches = self._read(file, shape.raw_schema, above, keep)
                for number, rows in enumerate(batches, 1):
                    _ensure_positions(rows)
                    yield rows
                    if number % _RELEASED_EVERY == 0:
                        pa.default_memory_pool().release_unused()

    def may_have_old_keys(self, file: File) -> bool:
        """Return whether some update in a file may have changed its key."""
        schema = self._log.schema()
        assert schema is not None
        only_before = pa.schema([schema.field("_cdc_before")])
        with self.faults():
            return any(
                rows["_cdc_before"].null_count < rows.num_rows
                for rows in self._read(file, only_before)
            )


def _overlaps(epochs: tuple[int, int], after: int, through: int) -> bool:
    first, last = epochs
    return first <= through and last > after


def _above(marker: Position) -> Position | None:
    return None if marker == BEGINNING else marker


def has_only_reads(file: File) -> bool:
    """Return whether a file has only `r` rows, by its statistics."""
    low, high = (file[1].get(name) or {} for name in ("minValues", "maxValues"))
    return bool(low.get("_cdc_seq") == high.get("_cdc_seq") == 0)


def _is_one_read(file: File) -> bool:
    """Return whether a file has only `r` rows at one position, by its statistics."""
    low, high = (file[1].get(name) or {} for name in ("minValues", "maxValues"))
    lsn = low.get("_cdc_lsn")
    is_known = file[1].get("numRecords") is not None and lsn is not None
    return is_known and has_only_reads(file) and bool(lsn == high.get("_cdc_lsn"))


def _ensure_positions(rows: pa.Table) -> None:
    """Raise DamagedError for rows that no writer of ingestd has made."""
    ops = pc.unique(rows["_cdc_op"]).to_pylist()
    if (
        not _OPERATIONS.issuperset(ops)
        or rows["_cdc_lsn"].null_count
        or rows["_cdc_seq"].null_count
    ):
        what = "a data file has rows without an operation or a position: another program wrote it"
        raise DamagedError(what)


def _survey_rows(survey: RawSurvey, rows: pa.Table) -> None:
    survey.rows += rows.num_rows
    for op in pc.unique(rows["_cdc_op"]).to_pylist():
        own = rows.filter(pc.equal(rows["_cdc_op"], op))
        if op == SNAPSHOT:
            survey.read_at.update(pc.unique(own["_cdc_lsn"]).to_pylist())
        elif op == TRUNCATE:
            survey.marker = max(survey.marker, highest(own))
        else:
            survey.changed_to = max(survey.changed_to, highest(own))
    unsent = rows["_cdc_unchanged"].drop_null()
    if len(unsent):
        survey.unsent.update(pc.unique(pc.list_flatten(unsent)).to_pylist())


def changes_key(rows: pa.Table, key: Sequence[str]) -> pa.Array:
    """Return which converted rows are updates that changed their key's hash.

    Keys with values that are only texts may have equal hashes, which is one partition as well.
    """
    before = rows["_cdc_before"]
    is_update = pc.and_(before.is_valid(), pc.equal(rows["_cdc_op"], UPDATE))
    is_update = is_update.combine_chunks()
    if not pc.any(is_update).as_py():
        return is_update
    some = rows.filter(is_update)
    differs = key_hashes(some, key) != key_hashes(old_keys(some, key), key)
    flags = np.zeros(rows.num_rows, bool)
    flags[np.flatnonzero(is_update.to_numpy(zero_copy_only=False))[differs]] = True
    return pa.array(flags)


def old_keys(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the keys that rows had before; null where no old row was sent."""
    before = rows["_cdc_before"]
    return pa.table([field_of(before, name) for name in key], names=list(key))
