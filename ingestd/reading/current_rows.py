"""The current rows of one table at a cut, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.digests.value_hashes import Hashes
from ingestd.lake.definitions import Definition
from ingestd.lake.delta.data_files import DataFileReader
from ingestd.lake.fold.multiset import MultisetRows, remaining
from ingestd.lake.fold.outcomes import DELETED, KEPT
from ingestd.lake.fold.raw_texts import NAMES_TYPE, RAW_TYPE, TextEntries
from ingestd.lake.fold.vectorized import fold_to_outcomes
from ingestd.lake.store.store import Store
from ingestd.model.changes import SNAPSHOT
from ingestd.model.errors import ConfigError, TableError, did_you_mean, resnapshot_command
from ingestd.model.schema import TableId
from ingestd.reading.conditions import RowCondition
from ingestd.reading.cut import SourceCut
from ingestd.reading.key_partitions import MEMORY_BYTES, KeyPartitions, PartitionHashes
from ingestd.reading.output_columns import CHANGE_FIELDS, OutputColumn, RowShape, output_columns
from ingestd.reading.raw_files import ChosenFile, RawFiles, has_only_reads

RAW = "_cdc_raw"
POSITION_COLUMNS = ("_cdc_lsn", "_cdc_seq", "_cdc_ts")
"""Of the newest change of a row: may be requested for tables with a key."""
BATCH_ROWS = 1 << 16
_FEW_ROWS = 50_000
"""A file of fewer rows has about one row group."""
_HASH, _COUNT = "_cdc_hash", "_cdc_count"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows are read.

    `columns`: names of the result's columns, in order; None: the source's and `_cdc_raw`. `where`:
    a condition on the result's columns. `merge_versions`: see `output_columns`. `memory_bytes` and
    `folder`: see `KeyPartitions`.
    """

    columns: Sequence[str] | None = None
    where: pc.Expression | None = None
    merge_versions: bool = True
    memory_bytes: int = MEMORY_BYTES
    folder: str | None = None


class CurrentRows:
    """Reads a table at a cut. Raises what makes the rows unavailable at once; blocks.

    Raise ConfigError for an unknown table or column, and a condition that is not valid; TableError
    for a table that is not complete, or of which rows were removed.
    """

    def __init__(self, store: Store, cut: SourceCut, table: TableId, options: ReadOptions) -> None:
        self._cut, self._table, self._options = cut, table, options
        self._definition = cut.complete(table)
        every = output_columns(self._definition, merge_versions=options.merge_versions)
        self._key = _key_of(self._definition, every)
        self._names = self._requested(every)
        self._where = self._condition(every)
        self._files = RawFiles(store, cut.records.source, table, cut.epoch)
        self._survey = self._files.survey()
        cut.ensure_all_rows(
            table, self._survey.rows, self._files.rows_by_epoch, self._survey.marker[0]
        )
        self._shape = self._row_shape(every)
        self._links = self._files.links(self._shape, self._survey.marker, self._survey.unsent)
        self.schema = self._output_schema(every)
        """The result's schema."""

    # --- what is read -------------------------------------------------------------------------

    def _requested(self, every: Sequence[OutputColumn]) -> list[str]:
        if self._options.columns is None:
            return [*(c.name for c in every), RAW]
        allowed = _available(every, self._key).names
        for name in self._options.columns:
            if name not in allowed:
                hint = did_you_mean(name, allowed)
                own = ", ".join(allowed)
                msg = f"columns: {self._table} has no column {name!r}: {hint}it has {own}"
                raise ConfigError(msg)
        return list(dict.fromkeys(self._options.columns))

    def _condition(self, every: Sequence[OutputColumn]) -> RowCondition | None:
        if self._options.where is None:
            return None
        return RowCondition(self._options.where, _available(every, self._key), self._key)

    def _row_shape(self, every: Sequence[OutputColumn]) -> RowShape:
        read = every
        if self._key:  # else a row is all of its values
            condition = self._where.columns if self._where else ()
            wanted = {*self._key, *self._names, *condition}
            read = [c for c in every if c.name in wanted or RAW in condition]
        names = {n: c.name for c in read for n in c.stored}
        old = frozenset(names[n] for n in self._survey.unsent if n in names)
        return RowShape(tuple(read), self._key, old)

    def _output_schema(self, every: Sequence[OutputColumn]) -> pa.Schema:
        available = _available(every, self._key)
        return pa.schema([available.field(name) for name in self._names])

    # --- reading ------------------------------------------------------------------------------

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, in no particular order, in batches of at most BATCH_ROWS."""
        for rows in self._tables():
            chosen = self._chosen(self._matching(rows))
            yield from chosen.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)

    def _matching(self, rows: pa.Table) -> pa.Table:
        return rows if self._where is None else rows.filter(self._where.expression)

    def _chosen(self, rows: pa.Table) -> pa.Table:
        columns = []
        for each in self.schema:
            column = rows[each.name]
            if each.name == RAW and column.null_count < len(column):
                column = _texts_of(column, {*self._names})
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _tables(self) -> Iterator[pa.Table]:
        if self._survey.is_one_snapshot:
            yield from self._changes()
        elif self._key:
            yield from self._folded()
        else:
            yield from self._multiset()

    def _changes(self) -> Iterator[pa.Table]:
        files = None
        where = None if self._links or not self._key else self._where
        if where is not None:
            files = list(self._chosen_files(where))
        for rows in self._files.changes(self._shape, self._survey.marker, files):
            self._ensure_same_key(rows)
            yield where.rows_to_fold(rows) if where and where.reads_only_key else rows

    def _chosen_files(self, where: RowCondition) -> Iterator[ChosenFile]:
        """Yield the files, and row groups, that may have a change of a row that matches.

        By bounds of the key. An update that changed its key also changes the row of its old key,
        of which nothing has bounds.
        """
        stored = {
            c.name: c.newest
            for c in self._shape.columns
            if c.name in self._key and len(c.stored) == 1 and not c.since_lsn
        }

        def may_match(parquet: DataFileReader, group: int) -> bool:
            return where.may_match({n: parquet.bounds(group, own) for n, own in stored.items()})

        for file in self._files.files:
            low, high = (file[1].get(name) or {} for name in ("minValues", "maxValues"))
            bounds = {n: (low.get(own), high.get(own)) for n, own in stored.items()}
            is_match = where.may_match(bounds)
            is_small = (file[1].get("numRecords") or 0) < _FEW_ROWS
            if (is_match and is_small) or (
                not has_only_reads(file) and self._files.may_have_old_keys(file)
            ):
                yield file, None
            elif is_match:
                yield file, may_match

    def _ensure_same_key(self, rows: pa.Table) -> None:
        if self._definition.key_since_lsn:
            changes = rows.filter(pc.not_equal(rows["_cdc_op"], SNAPSHOT))
            if changes.num_rows:
                lowest = pc.min(changes["_cdc_lsn"]).as_py()
                self._cut.ensure_same_key(self._table, self._definition, lowest)

    def _folded(self) -> Iterator[pa.Table]:
        hashes = PartitionHashes(self._key, self._links)
        partitions = KeyPartitions(
            self._shape.schema,
            hashes,
            hashes.reduced,
            expected_rows=self._survey.rows,
            memory_bytes=self._options.memory_bytes,
            folder=self._options.folder,
        )
        try:
            for rows in self._changes():
                partitions.add_rows(rows)
            for rows in partitions.tables():
                yield self._fold(rows)
        finally:
            partitions.close()

    def _fold(self, rows: pa.Table) -> pa.Table:
        names = [c.name for c in self._shape.columns]
        folded = fold_to_outcomes(rows, names, self._key, max_singly=rows.num_rows * len(names))
        assert folded is not None
        outcomes = folded.outcomes
        if folded.kept_under_old_key:
            kept: list[list[str] | None] = outcomes[KEPT].to_pylist()
            for number, name, _ in folded.kept_under_old_key:
                kept[number] = [*(kept[number] or ()), name]
            index = outcomes.schema.get_field_index(KEPT)
            outcomes = outcomes.set_column(index, KEPT, pa.array(kept, NAMES_TYPE))
        # Rows that don't match may be incomplete: not all files were read for them.
        outcomes = self._matching(outcomes.filter(pc.invert(outcomes[DELETED])))
        incomplete = outcomes[KEPT].drop_null()
        if len(incomplete):
            raise self._never_read(incomplete[0].as_py()[0])
        return outcomes

    def _never_read(self, column: str) -> TableError:
        return TableError(
            self._table,
            f"the value of column {column} in some row was not sent with any change that the lake"
            " has: the row was never read",
            remedy=f"re-read it: {resnapshot_command(self._cut.records.source, self._table)}",
        )

    def _multiset(self) -> Iterator[pa.Table]:
        names = [c.name for c in self._shape.columns]
        multiset = MultisetRows(names)
        own = [(c.name, c.type) for c in self._shape.columns]
        schema = pa.schema([*own, (RAW, RAW_TYPE), (_HASH, pa.uint64()), (_COUNT, pa.int8())])
        partitions = KeyPartitions(
            schema,
            _with_stored_hashes,
            _net,
            expected_rows=self._survey.rows,
            memory_bytes=self._options.memory_bytes,
            folder=self._options.folder,
        )
        try:
            for changes in self._changes():
                added, removed = multiset.added(changes), multiset.removed(changes)
                partitions.add_rows(_counted(added, multiset.hashes(added), 1, schema))
                partitions.add_rows(_counted(removed, multiset.hashes(removed), -1, schema))
            for rows in partitions.tables():
                left = _net(rows)
                yield left.filter(pc.equal(left[_COUNT], 1))
        finally:
            partitions.close()


def _counted(rows: pa.Table, hashes: Hashes, count: int, schema: pa.Schema) -> pa.Table:
    """Return rows with their hashes and a count; of removed rows only these."""
    counts = pa.array(np.full(rows.num_rows, count, np.int8))
    own = [
        rows[each.name] if count > 0 else pa.nulls(rows.num_rows, each.type)
        for each in schema
        if each.name not in {_HASH, _COUNT}
    ]
    return pa.Table.from_arrays([*own, pa.array(hashes), counts], schema=schema)


def _net(rows: pa.Table) -> pa.Table:
    """Return the rows without pairs of an added row and a removed one that is equal."""
    is_added = pc.equal(rows[_COUNT], 1)
    sides = rows.filter(is_added), rows.filter(pc.invert(is_added))
    added, removed = (side[_HASH].to_numpy() for side in sides)
    numbers = remaining(added, removed), remaining(removed, added)
    left = [side.take(pa.array(own)) for side, own in zip(sides, numbers, strict=True)]
    return pa.concat_tables(left)


def _with_stored_hashes(rows: pa.Table) -> tuple[pa.Table, Hashes]:
    return rows, rows[_HASH].to_numpy()


def _key_of(definition: Definition, every: Sequence[OutputColumn]) -> tuple[str, ...]:
    return tuple(c.name for c in every if c.newest in definition.key)


def _available(every: Sequence[OutputColumn], key: Sequence[str]) -> pa.Schema:
    """Return the schema of all columns that may be requested."""
    own = [(c.name, c.type) for c in every]
    position = [(name, CHANGE_FIELDS[name]) for name in POSITION_COLUMNS if key]
    return pa.schema([*own, (RAW, RAW_TYPE), *position])


def _texts_of(raw: pa.ChunkedArray, names: set[str]) -> pa.Array:
    """Return `_cdc_raw` with the texts of these columns only."""
    entries = TextEntries.from_column(raw.combine_chunks())
    return entries.renamed(lambda name: name if name in names else None).to_column(len(raw))
