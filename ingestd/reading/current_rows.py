"""The current rows of one table at a cut, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.digests.value_hashes import HashBlocks, Hashes
from ingestd.lake.definitions import Definition
from ingestd.lake.delta.data_files import DataFileReader
from ingestd.lake.fold.multiset import MultisetRows, remaining
from ingestd.lake.fold.outcomes import DELETED, KEPT
from ingestd.lake.fold.raw_texts import NAMES_TYPE, RAW_TYPE, TextEntries
from ingestd.lake.fold.row_keys import are_compared
from ingestd.lake.fold.vectorized import fold_to_outcomes
from ingestd.lake.reference.raw_changes import KeepGroup
from ingestd.lake.store.store import Store
from ingestd.model.changes import SNAPSHOT
from ingestd.model.errors import ConfigError, TableError, did_you_mean, resnapshot_command
from ingestd.model.schema import TableId
from ingestd.reading.conditions import RowCondition
from ingestd.reading.cut import SourceCut
from ingestd.reading.key_partitions import MEMORY_BYTES, KeyPartitions, PartitionHashes
from ingestd.reading.output_columns import CHANGE_FIELDS, OutputColumn, RowShape, output_columns
from ingestd.reading.raw_files import BEGINNING, ChosenFile, RawFiles, has_only_reads
from ingestd.reading.row_cache import (
    CachedRows,
    TableCache,
    TouchedKeys,
    as_changes,
    signature_of,
)

RAW = "_cdc_raw"
POSITION_COLUMNS = ("_cdc_lsn", "_cdc_seq", "_cdc_ts")
"""Of the newest change of a row: may be requested for tables with a key."""
BATCH_ROWS = 1 << 16
_FEW_ROWS = 50_000
"""A file of fewer rows has about one row group."""
_FEW_CHANGES, _CHANGED_SHARE = 10_000, 20
"""Cached rows are replaced once more changes follow, and more than one in so many rows."""
_HASH, _COUNT = "_cdc_hash", "_cdc_count"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows are read.

    `columns`: names of the result's columns, in order; None: the source's and `_cdc_raw`. `where`:
    a condition on the result's columns. `merge_versions`: see `output_columns`. `memory_bytes` and
    `folder`: see `KeyPartitions`. `cache`: of the table; used if it has a key.
    """

    columns: Sequence[str] | None = None
    where: pc.Expression | None = None
    merge_versions: bool = True
    memory_bytes: int = MEMORY_BYTES
    folder: str | None = None
    cache: TableCache | None = None


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
        self._store = store
        self._cached = self._find_cached(every)
        after = 0 if self._cached is None else self._cached.epoch
        self._files = RawFiles(store, cut.records.source, table, cut.epoch, after)
        self._survey = self._files.survey()
        if self._cached is None:
            cut.ensure_all_rows(
                table, self._survey.rows, self._files.rows_by_epoch, self._survey.marker[0]
            )
        else:
            cut.ensure_rows_since(table, after, self._files.rows_by_epoch())
        self._shape = self._row_shape(every)
        self._blocks = HashBlocks.salted()
        self._links = self._files.links(
            self._shape, self._survey.marker, self._survey.unsent, self._blocks
        )
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

    # --- the cache ----------------------------------------------------------------------------

    def _find_cached(self, every: Sequence[OutputColumn]) -> CachedRows | None:
        """Return cached rows from which this cut can be read, after creating them if needed.

        None: the cut precedes them, or the table can't be cached.
        """
        cache = self._options.cache
        available = _available(every, self._key)
        is_comparable = are_compared(available.empty_table(), self._key)
        if cache is None or not self._key or not is_comparable or not self._options.merge_versions:
            return None
        signature = signature_of(every, self._key, self._definition.key_since_lsn)
        found = cache.find()
        if not self._is_kept(found, signature):
            with cache.filling():
                found = cache.find()  # another reader may have filled it
                if not self._is_kept(found, signature):
                    found = self._fill(cache, signature, available.names)
        return None if found is None or found.epoch > self._cut.epoch else found

    def _fill(self, cache: TableCache, signature: Any, names: Sequence[str]) -> CachedRows:  # noqa: ANN401
        options = replace(self._options, columns=names, where=None, cache=None)
        rows = CurrentRows(self._store, self._cut, self._table, options)
        end = self._cut.end_of(self._cut.epoch)
        assert end is not None
        return cache.write(signature, self._cut.epoch, end, rows.batches(), rows.schema)

    def _is_kept(self, cached: CachedRows | None, signature: object) -> bool:
        """Return whether an entry is later than this cut, or this cut can be read from it.

        So only a few changes follow, without a snapshot's rows or markers: rows of a snapshot may
        precede changes that are in the cached rows already.
        """
        if cached is None:
            return False
        if cached.epoch > self._cut.epoch:
            return True
        if cached.signature != signature or cached.end != self._cut.end_of(cached.epoch):
            return False
        source = self._cut.records.source
        later = RawFiles(self._store, source, self._table, self._cut.epoch, cached.epoch)
        found = later.survey()
        is_few = found.rows <= max(_FEW_CHANGES, cached.rows // _CHANGED_SHARE)
        return is_few and not found.read_at and found.marker == BEGINNING

    def _brought_forward(self, cached: CachedRows) -> Iterator[pa.Table]:
        """Yield the cached rows, those that changed since as they are now.

        Changes that need too much memory are folded with all rows of the lake instead.
        """
        parts, nbytes = [self._shape.schema.empty_table()], 0
        for rows in self._changes():
            parts.append(rows)
            nbytes += rows.nbytes
            if nbytes > self._options.memory_bytes:
                options = replace(self._options, cache=None)
                every = CurrentRows(self._store, self._cut, self._table, options)
                yield from every._tables()
                return
        changes = pa.concat_tables(parts).combine_chunks()
        touched = TouchedKeys(changes, self._key)
        names = [c.name for c in self._shape.columns]
        available = [*((c.name, c.type) for c in self._shape.columns), (RAW, RAW_TYPE)]
        position = [(name, CHANGE_FIELDS[name]) for name in POSITION_COLUMNS]
        found = [changes]
        for rows, is_touched in cached.split(pa.schema([*available, *position]), touched):
            own = rows
            if rows[RAW].null_count < rows.num_rows:
                own = rows.set_column(len(names), RAW, _texts_of(rows[RAW], set(names)))
            if is_touched:
                found.append(as_changes(own, self._shape.schema))
            else:
                yield self._matching(own)
        yield self._fold(pa.concat_tables(found))

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
        if self._cached is not None:
            yield from self._brought_forward(self._cached)
        elif self._survey.is_one_snapshot:
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
        stored = self._bounded_key()
        may_match = self._group_filter(where)
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

    def _bounded_key(self) -> dict[str, str]:
        """Return the key columns of which bounds are those of all rows, with the lake's names."""
        return {
            c.name: c.newest
            for c in self._shape.columns
            if c.name in self._key and len(c.stored) == 1 and not c.since_lsn
        }

    def _group_filter(self, where: RowCondition) -> KeepGroup:
        """Return whether a row group may have a row that matches, by bounds of the key."""
        stored = self._bounded_key()

        def may_match(parquet: DataFileReader, group: int) -> bool:
            return where.may_match({n: parquet.bounds(group, own) for n, own in stored.items()})

        return may_match

    def _ensure_same_key(self, rows: pa.Table) -> None:
        if self._definition.key_since_lsn:
            changes = rows.filter(pc.not_equal(rows["_cdc_op"], SNAPSHOT))
            if changes.num_rows:
                lowest = pc.min(changes["_cdc_lsn"]).as_py()
                self._cut.ensure_same_key(self._table, self._definition, lowest)

    def _folded(self) -> Iterator[pa.Table]:
        hashes = PartitionHashes(self._key, self._links, self._blocks)
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
