"""Merges of outcomes into a mirror by the driver: no Spark job, one commit.

========================================  ======================================================
a file of the mirror                      action
========================================  ======================================================
has none of the outcomes' keys            none
small, or many of its rows change         replaced by a new file
large                                     gets a deletion vector; changed rows go to a new file
========================================  ======================================================

Tables that are not plain (column mapping, constraints) and more data than fits in memory are left
to Spark. Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from ingestd.lake.delta.commit import statistics_of
from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.fold.outcomes import KEPT
from ingestd.lake.fold.row_keys import are_compared
from spark_jobs.accelerator.class_log import snapshot_of
from spark_jobs.accelerator.driver_commit import (
    AppTransaction,
    OutputMode,
    commit,
    is_plain,
    new_file,
    removed,
)
from spark_jobs.accelerator.driver_files import (
    Rows,
    TooLargeError,
    deleted_rows,
    read_parquet,
    write_vectors,
)
from spark_jobs.accelerator.switch import Switch
from spark_jobs.delta_log.commits import Signature
from spark_jobs.fold.arrow_merge import MAX_HASHED, Merge, merge, shaped
from spark_jobs.lake.types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.accelerator.file_cache import Action, MirrorFiles
    from spark_jobs.delta_log.acceleration import MergeLimits

_WRITTEN_NBYTES = 64 << 20
"""Rows that take more memory than this are written as several files, in threads."""
_MAX_LOOKED_UP = 100_000
"""With more keys than this, every file is assumed to have some of them."""
_POSITION = ("_cdc_lsn", "_cdc_seq")


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A file of the mirror with `total` rows. `rows`: the undeleted ones; `numbers`: theirs."""

    add: Action
    total: int
    rows: pa.Table
    numbers: Rows
    has_all_columns: bool

    @property
    def count(self) -> int:
        return int(self.rows.num_rows)


@dataclass(frozen=True, slots=True)
class DriverMerge:
    """The mirror at `path`, which holds epoch `above`.

    Commits are of the application `app_id`. The methods raise Py4JError if a store fails, or if
    another commit came in between.
    """

    session: SparkSession
    path: str
    app_id: str
    above: int
    files: MirrorFiles
    limits: MergeLimits
    switch: Switch = field(default_factory=Switch)

    @property
    def is_likely(self) -> bool:
        """See `OutcomeMerge`."""
        try:
            return self._is_small_enough()
        except (Py4JError, PySparkException) as error:
            if self.switch.stays_on(self.session, error):
                raise
            return False

    def apply(self, outcomes: pa.Table, key: Sequence[str], signature: Signature) -> bool:
        """See `OutcomeMerge`."""
        try:
            return self._apply(outcomes, key, signature)
        except (Py4JError, PySparkException) as error:
            if self.switch.stays_on(self.session, error):
                raise
            # Spark takes the step. (Of a commit that was made after all, it makes no second one.)
            return False

    def _is_small_enough(self) -> bool:
        found = self.files.at_snapshot(
            self.session, self.path, snapshot_of(self.session, self.path)
        )
        return found is not None and _size(found.adds.values()) <= self.limits.read_file_bytes

    def _apply(self, outcomes: pa.Table, key: Sequence[str], signature: Signature) -> bool:
        snapshot = snapshot_of(self.session, self.path)
        kind = StructType.fromJson(json.loads(snapshot.schema().json()))
        if not _can_be_changed(snapshot, kind):
            return False
        found = self.files.at_snapshot(self.session, self.path, snapshot)
        # (another run may have moved the mirror meanwhile)
        if found is None or found.signature is None or found.signature.epoch != self.above:
            return False
        touched = _files_that_may_have(found.adds, outcomes, key[0]) if found.adds else []
        touched += self._small_files_to_join(found.adds, touched)
        if _size(touched) > self.limits.read_file_bytes or not _can_be_matched(
            touched, outcomes, key
        ):
            return False
        with self.files.room_for(_size(touched)):
            try:
                schema = arrow_schema(kind)
                actions = self._actions(touched, outcomes, key, schema)
            except (TooLargeError, pa.ArrowException, OSError, ValueError):
                self.files.leave_to_spark(self.path, found)  # which reports the fault better
                return False
            if actions is None:
                return False
            replaced = {a["remove"]["path"] for a in actions if "remove" in a}
            mode: OutputMode = "Complete" if replaced == found.adds.keys() else "Update"
            return commit(
                self.session,
                self.path,
                actions,
                AppTransaction(self.app_id, signature.epoch, mode),
                signature=signature.to_text(),
                of_version=found.version,
            )

    # --- reading and writing --------------------------------------------------------------------

    def _actions(
        self, touched: Sequence[Action], outcomes: pa.Table, key: Sequence[str], schema: pa.Schema
    ) -> list[Action] | None:
        """Write the outcomes of these files; return the actions of the commit."""
        kept = pc.unique(pc.list_flatten(outcomes[KEPT])).to_pylist()
        names = [f.name for f in schema if f.name in {*key, *kept, *_POSITION, "_cdc_raw"}]
        parts: list[_FilePart] = []
        remaining_nbytes = self.limits.read_memory_bytes
        for add in touched:
            parts.append(self._read_file(add, outcomes.num_rows, schema, names, remaining_nbytes))
            remaining_nbytes -= parts[-1].rows.nbytes
        needed = pa.schema([schema.field(name) for name in names])
        old = pa.concat_tables(
            [part.rows.select(names) for part in parts] or [needed.empty_table()]
        )
        merged = merge(old, outcomes, key, schema)
        return None if merged is None else self._written(parts, merged, key)

    def _read_file(
        self, add: Action, changes: int, schema: pa.Schema, names: Sequence[str], max_nbytes: int
    ) -> _FilePart:
        """Read a file: all columns if it may be rewritten, else only these."""
        deleted = deleted_rows(self.session, self.path, add)
        count = statistics_of(add.get("stats")).get("numRecords", 0)
        has_all_columns = self._is_rewritten(add, changes + len(deleted), count)
        read = read_parquet(
            self.session,
            self.path,
            file_of(add["path"], self.path),
            columns=None if has_all_columns else names,
            max_nbytes=max_nbytes,
        )
        fields = schema if has_all_columns else pa.schema([schema.field(name) for name in names])
        total = read.num_rows
        numbers = np.arange(total)
        if len(deleted):
            stays = np.ones(total, bool)
            stays[deleted] = False
            read, numbers = read.filter(pa.array(stays)), numbers[stays]
        return _FilePart(add, total, shaped(read, fields), numbers, has_all_columns)

    def _written(
        self, parts: Sequence[_FilePart], merged: Merge, key: Sequence[str]
    ) -> list[Action]:
        are_joined = sum(self._is_small(part.add) for part in parts) > self.limits.most_small_files
        actions: list[Action] = []
        rows, vectors = [], []
        is_written = np.zeros(merged.rows.num_rows, bool)
        first, now_ms = 0, time.time_ns() // 1_000_000
        for part in parts:
            last = first + part.count
            mine = slice(*np.searchsorted(merged.row_numbers, [first, last]))
            row_numbers = merged.row_numbers[mine] - first
            if len(row_numbers) or (are_joined and self._is_small(part.add)):
                actions.append(removed(part.add, now_ms))
                lost = part.total - part.count + len(row_numbers)
                if part.has_all_columns and self._is_rewritten(part.add, lost, part.total):
                    rows.append(merged.applied(part.rows, first))
                    replacements = merged.replacements[mine]
                    is_written[replacements[replacements >= 0]] = True
                else:
                    stays = np.ones(part.count, bool)
                    stays[row_numbers] = False
                    vectors.append((part, stays))
            first = last
        rows.append(merged.rows.filter(pa.array(~is_written)))
        actions += self._with_vectors(vectors, now_ms)
        return actions + self._new_files(pa.concat_tables(rows), key)

    def _with_vectors(
        self, parts: Sequence[tuple[_FilePart, NDArray[np.bool_]]], now_ms: int
    ) -> list[Action]:
        """Write the vectors of files that lose rows; return their `add` actions."""
        if not parts:
            return []
        every = []
        for part, stays in parts:
            deleted = np.ones(part.total, bool)
            deleted[part.numbers[stays]] = False
            every.append(np.flatnonzero(deleted))
        actions = []
        vectors = write_vectors(self.session, self.path, every)
        for (part, _), vector in zip(parts, vectors, strict=True):
            statistics = statistics_of(part.add.get("stats"))
            statistics |= {"numRecords": part.total, "tightBounds": False}
            changed = {
                "dataChange": True,
                "stats": json.dumps(statistics),
                "deletionVector": vector,
            }
            actions.append({"add": part.add | {"modificationTime": now_ms} | changed})
        return actions

    def _new_files(self, rows: pa.Table, key: Sequence[str]) -> list[Action]:
        if not rows.num_rows:
            return []
        count = min(math.ceil(rows.nbytes / _WRITTEN_NBYTES), 4)
        each = math.ceil(rows.num_rows / count)
        slices = [rows.slice(first, each) for first in range(0, rows.num_rows, each)]
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda part: self._new_file(part, key), slices))

    def _new_file(self, rows: pa.Table, key: Sequence[str]) -> Action:
        return new_file(self.session, self.path, rows, indexed=[*key, *_POSITION])

    # --- sizes ----------------------------------------------------------------------------------

    def _is_rewritten(self, add: Action, lost: int, rows: int) -> bool:
        return self._is_small(add) or lost * self.limits.file_changed_share > rows

    def _is_small(self, add: Action) -> bool:
        return bool(add["size"] < self.limits.small_file_bytes)

    def _small_files_to_join(
        self, adds: Mapping[str, Action], touched: Sequence[Action]
    ) -> list[Action]:
        """Return the small files besides `touched` that should be rewritten as one, if many."""
        small = {path: add for path, add in adds.items() if self._is_small(add)}
        if len(small) <= self.limits.most_small_files:
            return []
        for add in touched:
            small.pop(add["path"], None)
        others = list(small.values())
        fits = _size(touched) + _size(others) <= self.limits.read_file_bytes
        return others if fits else []


def _can_be_changed(snapshot: Any, kind: StructType) -> bool:  # noqa: ANN401 - Delta's
    properties = snapshot.metadata().configuration()
    has_vectors = properties.get("delta.enableDeletionVectors").contains("true")
    return has_vectors and all(field.nullable for field in kind) and is_plain(snapshot)


def _size(adds: Iterable[Action]) -> int:
    return sum(int(add["size"]) for add in adds)


def _can_be_matched(adds: Sequence[Action], outcomes: pa.Table, key: Sequence[str]) -> bool:
    """Return whether the driver can compare rows of these files: see `arrow_merge.merge`."""
    rows = sum(statistics_of(add.get("stats")).get("numRecords", 0) for add in adds)
    return rows <= MAX_HASHED or are_compared(outcomes, key)


def _files_that_may_have(adds: Mapping[str, Action], outcomes: pa.Table, name: str) -> list[Action]:
    """Return the files that may have keys of the outcomes, according to their statistics."""
    values = outcomes[name]
    is_many = len(values) > _MAX_LOOKED_UP
    if is_many or not pa.types.is_integer(values.type) or values.null_count:
        return list(adds.values())
    wanted = np.unique(values.to_numpy())
    found = []
    for add in adds.values():
        statistics = statistics_of(add.get("stats"))
        low, high = (statistics.get(n, {}).get(name) for n in ("minValues", "maxValues"))
        if (
            low is None
            or high is None
            or np.searchsorted(wanted, low) < np.searchsorted(wanted, high, side="right")
        ):
            found.append(add)
    return found
