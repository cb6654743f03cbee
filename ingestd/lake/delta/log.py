"""A reader for the log of a Delta table, also after a crash or a power failure.

Source: Delta protocol, "Delta Log Entries", "Transaction Identifiers".
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import TableNotFoundError

from ingestd.lake.delta.commit import (
    Commit,
    commit_path,
    is_complete_commit,
    parse_commit,
    read_commit,
)
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES, open_table
from ingestd.lake.delta.table_features import NotWritableError, Obstacle, TableTraits, find_obstacle
from ingestd.lake.delta.torn_files import set_aside_torn
from ingestd.lake.schema_evolution import lost_fields
from ingestd.lake.store.errors import storage_fault, storage_faults, truncated_log_error, unreadable
from ingestd.lake.store.store import Store
from ingestd.model.errors import FolderError, OperatorError
from ingestd.model.schema import lake_type_name

_MOST_REPAIRS = 2
"""A power failure leaves a commit and a checkpoint incomplete."""
RESUMES = "ingestd.resumes"
"""Table property: commits of this table may carry resume texts; without it none is searched."""

MOST_BACK = 10_000
"""Maximum number of commits that are searched back from the newest. Each start of a daemon may have
added one without data to a table that has no changes."""
MOST_BACK_BYTES = 4 * MOST_COMMIT_BYTES
MOST_VERSION = 1 << 48
"""Higher versions are not believed: those that follow must fit in the 64 bits of `_epochs`."""


@dataclass(slots=True)
class ReadingLimit:
    """How many commits, and bytes of them, are still read before the table stops.

    All tables of a source wait for the reading of one.
    """

    commits: int
    nbytes: int

    def spend(self, nbytes: int, uri: str) -> None:
        """Count a commit before it is read. Raise FolderError beyond the limit.

        A single commit that is too large is refused where it is read.
        """
        self.commits -= 1
        self.nbytes -= min(nbytes, MOST_COMMIT_BYTES)
        if self.commits < 0 or self.nbytes < 0:
            raise FolderError(
                f"lake table {uri}: too many commits without rows, or too large ones, in a row",
                remedy="stop the program that commits there, and put the folder back from a copy",
            )


@dataclass(frozen=True, slots=True)
class _TableState:
    """What must be known of a version to append to it."""

    schema: pa.Schema
    configuration: Mapping[str, str]
    obstacle: Obstacle | None


AcceptTorn = Callable[[int], None]
"""Called with the version of an incomplete commit; raises if that commit is indispensable."""


class TableLog:
    """The table in `folder` of `store`. All calls block; one at a time, from any thread.

    `app_id`: the Delta app transaction that its commits carry. Raises whatever `storage_fault`
    makes of an error.
    """

    removes_rows = False
    """Whether commits here may remove rows."""

    def __init__(self, store: Store, folder: str, app_id: str) -> None:
        self.store = store
        self.folder = folder
        self.app_id = app_id
        self._table: DeltaTable | None = None
        self._state: _TableState | None = None
        self._app_version: int | None = None
        self._knows_app_version = False
        self._version = -1
        self.set_aside: list[str] = []
        """Original names of the files that `load` set aside."""

    @property
    def uri(self) -> str:
        """The location of the table."""
        return self.store.uri(self.folder)

    @property
    def exists(self) -> bool:
        """Return whether `load` found the table or a commit created it."""
        return self._state is not None

    @property
    def version(self) -> int:
        """The Delta version last read or committed, -1 if there is no table."""
        return self._version

    @property
    def handle(self) -> DeltaTable:
        """Deltalake's handle, at `version`; reopened after appends.

        It stays at that version even if later ones exist, as they were not judged yet (I5).
        """
        assert self._state is not None, f"{self.uri} does not exist"
        if self._table is None:
            self._table = self._present(self._version)
        return self._table

    def load(self, accept_torn: AcceptTorn | None = None) -> None:
        """Read the newest version; pass `accept_torn` at a start, to recover from a crash.

        Then an incomplete newest commit or checkpoint is set aside (see `torn_files`), after
        `accept_torn` was called with the commit's version. If it raises, nothing is changed.
        """
        self._table = self._open() if accept_torn is None else self._open_repaired(accept_torn)
        self._version = -1 if self._table is None else self._table.version()
        self._read_state()

    def _open_repaired(self, accept_torn: AcceptTorn) -> DeltaTable | None:
        if not self.store.syncs:
            return self._open()
        repairs = 0
        while True:
            try:
                table = self._open()
            except OperatorError:
                if repairs == _MOST_REPAIRS:
                    raise
                found = set_aside_torn(self, accept_torn)
                if not found:
                    raise
            else:
                if table is None:
                    return None
                found = set_aside_torn(self, accept_torn, newest=table.version())
                if not found:
                    return table
            self.set_aside += found
            repairs += 1

    def newest_commit(self) -> Commit | None:
        """Read the newest commit; None if there is none, or it was removed with old ones.

        Raise OperatorError if a power failure truncated it.
        """
        if not self.has_commit(self._version):
            return None
        path = commit_path(self.folder, self._version)
        with storage_faults(self.uri):
            content = self.store.read(path, MOST_COMMIT_BYTES)
            if not is_complete_commit(content, self.store.uri(path)):
                raise truncated_log_error(self.uri)
            return parse_commit(content, self.store.uri(path))

    def foreign_version(self) -> int | None:
        """Return the newest version above all of ours by which another program changed rows."""
        return next((n for n, commit in self.others_commits() if commit.is_foreign_change), None)

    def others_commits(self) -> Iterator[tuple[int, Commit]]:
        """Yield the commits of other programs above the newest of ours, newest first."""
        newest = self.newest_commit()
        if newest is None or newest.is_ours:
            return
        yield self._version, newest
        for number, commit in self._back(self._version - 1):
            if commit.is_ours:
                return
            yield number, commit

    def _back(self, version: int) -> Iterator[tuple[int, Commit]]:
        """Yield the commits from that version back to the oldest that the log has."""
        limit = ReadingLimit(MOST_BACK, MOST_BACK_BYTES)
        while (nbytes := self.commit_bytes(version)) is not None:
            limit.spend(nbytes, self.uri)
            yield version, self._commit_at(version)
            version -= 1

    def ensure_columns_kept(self, commits: Sequence[tuple[int, Commit]]) -> None:
        """Raise FolderError if one of these commits (of `others_commits`) dropped a column."""
        given = [c.schema_json for _, c in commits if c.schema_json is not None]
        last = commits[-1][0] - 1 if commits else -1
        if given and self.has_commit(last):
            before = lake_schema(self._present(last).schema(), self.uri)
            for schema in given:
                self.refuse_lost(before, arrow_schema(schema, self.uri))

    def ensure_fields(self, wanted: pa.Schema) -> None:
        """Raise FolderError if the table lacks a column or field of this schema."""
        if self._state is not None:
            self.refuse_lost(wanted, self._state.schema)

    def refuse_lost(self, before: pa.Schema, after: pa.Schema) -> None:
        """Raise FolderError if `after` lacks a column or field, or has it with another type."""
        found = lost_fields(before, after)
        if found:
            raise FolderError(
                f"lake table {self.uri}: another program altered it: {'; '.join(found)}",
                remedy="put the folder back from a copy",
            )

    def newest_writer(self) -> str | None:
        """Return the writer of the newest signed commit; OPTIMIZE and ALTER are unsigned."""
        newest = self.newest_commit()
        if newest is None or newest.writer is not None:
            return None if newest is None else newest.writer
        signed = (commit.writer for _, commit in self._back(self._version - 1))
        return next((writer for writer in signed if writer is not None), None)

    def ensure_own(self) -> None:
        """Raise FolderError if the log belongs to another table, whose folder was put here.

        A table without rows may belong to any. Our commits are searched as far back as the log
        reaches, unless this table's app transaction is present, as it usually is.
        """
        if not self.exists or self.app_version() is not None:
            return
        for _, commit in self._back(self._version):
            for app_id in commit.own_app_ids():
                raise FolderError(
                    f"lake table {self.uri}: its commits belong to {app_id}, not to {self.app_id}",
                    remedy="put the folder back from a copy",
                )

    def _open(self, version: int | None = None) -> DeltaTable | None:
        """Return a handle at that version or the newest, None if there is no table."""
        with storage_faults(self.uri):
            try:
                return open_table(self.store, self.folder, version)
            except TableNotFoundError:
                return None

    def _present(self, version: int | None = None) -> DeltaTable:
        table = self._open(version)
        if table is None:
            raise storage_fault(FileNotFoundError(errno.ENOENT, "no table"), self.uri)
        return table

    def _read_state(self) -> None:
        self._knows_app_version = False
        table = self._table
        if table is None:
            self._state = None
            return
        if self._version > MOST_VERSION:
            raise FolderError(
                f"lake table {self.uri}: version {self._version} is more than {MOST_VERSION}",
                remedy="put the folder back from a copy",
            )
        with storage_faults(self.uri), unreadable(self.uri):
            self._state = _TableState(
                lake_schema(table.schema(), self.uri),
                dict(table.metadata().configuration),
                find_obstacle(_traits(table), removes_rows=self.removes_rows),
            )

    def schema(self) -> pa.Schema | None:
        """Return the Arrow schema, None if there is no table."""
        return None if self._state is None else self._state.schema

    @property
    def is_writable(self) -> bool:
        """Return whether the table exists and needs no feature that ingestd does not write."""
        return self._state is not None and self._state.obstacle is None

    def ensure_writable(self) -> None:
        """Raise NotWritableError if the table uses a feature that ingestd does not write."""
        if self._state is not None and self._state.obstacle is not None:
            raise NotWritableError(self.uri, self._state.obstacle)

    def app_version(self) -> int | None:
        """Return the version of the app transaction: the watermark.

        Read on demand, as it takes a request to the store for each commit since the checkpoint.
        """
        if self._state is None:
            return None
        if not self._knows_app_version:
            with storage_faults(self.uri), self.store.calls.during(self.store, self.folder):
                self._app_version = self.handle.transaction_version(self.app_id)
            self._knows_app_version = True
        return self._app_version

    def resume(self) -> str:
        """Return the text in the newest commit of ours; empty if it has none.

        Commits without our app transaction (OPTIMIZE, new columns) are skipped. If the commit was
        removed from the log, the result is empty.
        """
        if RESUMES not in self.configuration():
            return ""
        found = (commit.resume(self.app_id) for _, commit in self._back(self._version))
        return next((resume for resume in found if resume is not None), "")

    def configuration(self) -> dict[str, str]:
        """Return the table properties."""
        return {} if self._state is None else dict(self._state.configuration)

    def settle(self) -> None:
        """Make durable what `load` read: a kill may have come between a commit and its fsync (I1).

        Only the last commit needs it: each is made durable before the next.
        """
        if self.exists:
            self._sync(self._version)

    def _sync(self, *versions: int) -> None:
        """Make these commits durable, and the folder once (I1)."""
        if not self.store.syncs or not versions:
            return  # finding out which of the files exist would cost a store six requests
        log = f"{self.folder}/_delta_log"
        with storage_faults(self.uri):
            # A kill may have come between a checkpoint and the pointer to it.
            forms = (".json", ".checkpoint.parquet")
            written = [f"{version:020}{form}" for version in versions for form in forms]
            written.append("_last_checkpoint")
            names = [n for n in written if self.store.size(f"{log}/{n}") is not None]
            self.store.sync(log, names)
            if 0 in versions:
                self.store.sync(self.folder, [])

    def has_commit(self, version: int) -> bool:
        """Return whether the log has that commit; old commits are removed in time."""
        return self.commit_bytes(version) is not None

    def commit_bytes(self, version: int) -> int | None:
        """Return the size of a commit; None if the log does not have it."""
        with storage_faults(self.uri):
            return self.store.size(commit_path(self.folder, version)) if version >= 0 else None

    def _commit_at(self, version: int) -> Commit:
        with storage_faults(self.uri):
            return read_commit(self.store, self.folder, version)

    def _commit_if_any(self, version: int) -> Commit | None:
        with storage_faults(self.uri):
            try:
                return read_commit(self.store, self.folder, version)
            except FileNotFoundError:
                return None


def arrow_schema(delta_json: str, uri: str) -> pa.Schema:
    """Parse the schema in a commit's `metaData` action. Raise FolderError."""
    with unreadable(uri):
        return lake_schema(Schema.from_json(delta_json), uri)


def lake_schema(schema: Schema, uri: str) -> pa.Schema:
    """Convert a table's schema. Raise FolderError if it has a type that ingestd does not know.

    So all code may name the types of a loaded table.
    """
    with unreadable(uri):
        found = pa.schema(schema.to_arrow())
    for field in found:
        try:
            lake_type_name(field.type)
        except TypeError as error:
            raise FolderError(
                f"lake table {uri}: another program added the column {field.name!a}: {error}",
                remedy="put the folder back from a copy",
            ) from error
    return found


def _traits(table: DeltaTable) -> TableTraits:
    protocol, metadata = table.protocol(), table.metadata()
    return TableTraits(
        protocol.min_writer_version,
        protocol.writer_features or (),
        pa.schema(table.schema().to_arrow()),
        dict(metadata.configuration),
        metadata.partition_columns,
    )
