"""A Delta table to which exactly one daemon appends, by compare-and-swap (I3, I5).

Source: Delta protocol, "Delta Log Entries", "Transaction Identifiers". This module rests on these
facts about deltalake 1.6, all measured. With ``max_commit_retries=0`` a commit gets the version
that follows the handle's version, or fails. An error may be raised although the commit succeeded.
Repeated or lower app transaction versions are not refused. A write transaction neither checks nor
changes the schema, and does not advance the handle. A handle gets slower with each commit that it
has followed, and every commit through it lists `_delta_log` several times (1.7 us a file: 50 ms at
version 3000).

So where the store has conditional puts (`supports_conditional_put`), appends are written here,
without a handle, and their cost does not depend on the length of the log. A handle is opened for
reading and for changes of schema and properties. Checkpoints are made through a separate handle,
concurrently with the commits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import pyarrow as pa
from deltalake import CommitProperties, PostCommitHookProperties, Schema, Transaction
from deltalake.transaction import create_table_with_add_actions

from ingestd.failpoints import reach
from ingestd.lake.delta.checkpoint_schedule import (
    CHECKPOINT_EVERY,
    CHECKPOINT_INTERVAL,
    CheckpointSchedule,
    RunInBackground,
    run_at_once,
    turn_of,
)
from ingestd.lake.delta.commit import (
    FENCE,
    HOLDS,
    RESUME,
    TOKEN,
    WRITER,
    CommitAuthor,
    add_action,
    commit_path,
    commit_text,
)
from ingestd.lake.delta.conflicts import AppendedByAnotherError, ConflictChecker, ForeignCommitError
from ingestd.lake.delta.log import RESUMES, AcceptTorn, TableLog
from ingestd.lake.delta.log_files import ensure_readable_log
from ingestd.lake.delta.reading_limit import ReadingAllowance, ReadingLimit
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.store.errors import (
    BusyLogError,
    LogConflictError,
    is_library_error,
    storage_fault,
    storage_faults,
)
from ingestd.lake.store.store import Store
from ingestd.model.errors import FolderError, IngestdError, TransientError
from ingestd.ports import Fragment
from ingestd.process.clock import utc_now

REOPEN_EVERY = 20
ATTEMPTS = 10
"""How often a commit is tried when commits without data (OPTIMIZE) by others get in between."""

_NO_CLEANUP = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class Creation:
    """The schema and properties with which deltalake creates a table."""

    schema: pa.Schema
    configuration: Mapping[str, str]


class ReplacedError(FolderError):
    """The commit that was last read or made is missing, as after the restore of a copy."""


class AppendLog(TableLog):
    """See TableLog. Raises OperatorError also if another writer appended.

    `run_in_background`: see `CheckpointSchedule`; the next append raises the error of a checkpoint.
    `writer`: the process that commits; by default a new identity. `decides`: see `ConflictChecker`.
    `now`: see `ReadingAllowance`.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        app_id: str,
        run_in_background: RunInBackground = run_at_once,
        *,
        writer: WriterIdentity | None = None,
        decides: bool = True,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        super().__init__(store, folder, app_id)
        self._writer = writer or WriterIdentity()
        self._conflicts = ConflictChecker(self._writer, decides=decides)
        self.checkpoints = CheckpointSchedule(
            turn=turn_of(folder),
            every=CHECKPOINT_EVERY if store.syncs else CHECKPOINT_INTERVAL,
            run_in_background=run_in_background,
        )
        self._allowance = ReadingAllowance(now)
        self._commits = 0
        self._last_put = (-1, "")
        """The newest version that this object put, and its token."""

    def load(self, accept_torn: AcceptTorn | None = None) -> None:
        """Read the newest version, by any writer; see `TableLog.load`."""
        self._last_put = (-1, "")
        super().load(accept_torn)
        self._allowance.note_current()

    def ensure_unreplaced(self) -> None:
        """Raise ReplacedError if the commit that the next one would follow is missing.

        A copy of the lake has the same id. If an older copy took its place, the next version
        would follow a gap: no reader could open the table, although its rows were acknowledged.
        """
        if not self.exists:
            return
        commit = self._commit_if_any(self._version)
        if commit is not None:
            version, token = self._last_put
            if version != self._version or commit.stamps.get(TOKEN) == token:
                return
            what = f"a copy took its place: its version {version} is a different commit"
        elif (table := self._open()) is None:
            what = "the table no longer exists"
        elif table.version() >= self._version:
            return  # old commits are removed once a checkpoint contains them
        else:
            ends = f"it ends at version {table.version()}, and was written to {self._version}"
            what = f"a copy took its place: {ends}"
        raise ReplacedError(f"lake table {self.uri}: {what}", remedy="restore the table's folder")

    def create(
        self,
        creation: Creation,
        fragments: Sequence[Fragment] = (),
        app_version: int | None = None,
        resume: str = "",
    ) -> int:
        """Create the table, with its first rows in the same commit. Return the version."""
        known = {k: v for k, v in creation.configuration.items() if k.startswith("delta.")}

        def attempt(token: str) -> None:
            if self.exists:
                self._append(fragments, token, app_version, resume)
                return
            self.store.make_folder(self.folder)
            create_table_with_add_actions(
                self.uri,
                Schema.from_arrow(creation.schema),
                [add_action(f) for f in fragments],
                mode="error",
                configuration=known,
                storage_options=self.store.storage_options,
                commit_properties=self._properties(token, app_version, resume, len(fragments)),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def add_columns(self, fields: Sequence[pa.Field]) -> int:
        """Add columns, or fields of struct columns, without data. Return the version."""

        def attempt(token: str) -> None:
            self.handle.alter.add_columns(
                Schema.from_arrow(pa.schema(fields)).fields,
                commit_properties=self._properties(token, None),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def set_properties(self, properties: Mapping[str, str]) -> int:
        """Set table properties, also ones that Delta does not know. Return the version."""

        def attempt(token: str) -> None:
            self.handle.alter.set_table_properties(
                dict(properties),
                raise_if_not_exists=False,
                commit_properties=self._properties(token, None),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def expect_resumes(self) -> None:
        """Enable `resume` for this table, by one commit in the table's life."""
        if RESUMES not in self.configuration():
            self.set_properties({RESUMES: "true"})

    def commit_files(
        self, fragments: Sequence[Fragment], app_version: int | None = None, resume: str = ""
    ) -> int:
        """Commit files, an app transaction, or both. Return the version.

        `resume`: the text that `resume` reads back, empty for none; only with an app transaction,
        and after `expect_resumes`.
        """
        self.checkpoints.raise_fault()
        if self.store.supports_conditional_put and self.exists:
            return self._put(fragments, app_version, resume)
        return self._commit(lambda token: self._append(fragments, token, app_version, resume))

    def fence(self) -> None:
        """Fence out all writers that read the log before, with a commit without data (I5).

        No fence is needed if the newest commit is this process's own: other writers have read an
        older version. The exception is a failed commit of this process that may still appear, as
        it would take the next version. Raise TransientError if that commit, or another ingestd's,
        was made since `load` (AllegedTakeoverError if this log does not decide); the fence is made
        after its rows all the same, so that a re-read finds nothing newer. Raise ForeignCommitError
        if another program committed.

        The fence repeats the app transaction and `resume`. So a search for the newest ones ends
        here, not behind the fences of all earlier starts, and earlier commits can be removed.
        """
        came_between: AppendedByAnotherError | None = None
        for _ in range(ATTEMPTS):
            newest = self.newest_commit() if self.exists else None
            is_own = newest is not None and newest.writer == self._writer.name
            is_in_doubt = self._writer.is_in_doubt(self.folder, self._version)
            if not self.exists or (is_own and not is_in_doubt):
                break
            try:
                app_version = self.app_version()
                resume = "" if app_version is None else self.resume()
                if self.store.supports_conditional_put:
                    self._put([], app_version, resume, is_fence=True)
                else:
                    stamped = partial(self._append, app_version=app_version, resume=resume)
                    self._commit(partial(stamped, [], is_fence=True))
            except ForeignCommitError:
                raise  # a commit of ours after it would hide it
            except AppendedByAnotherError as error:
                came_between = error
                self.load()
            else:
                break
        if isinstance(came_between, FolderError):
            raise came_between
        if came_between is not None:
            raise TransientError(
                f"lake table {self.uri}: another writer committed while this one took over",
                reason="claimed",
                remedy="nothing to do: the lake is re-read",
            ) from came_between

    def is_first_allegation(self) -> bool:
        """See `WriterIdentity.is_first_allegation`."""
        return self._writer.is_first_allegation(self.folder)

    def ensure_latest(self) -> None:
        """Raise as an append would if another ingestd has committed since; commit nothing."""
        if self.exists:
            self._read_intervening(uuid.uuid4().hex, None, self._allowance.limit())

    # --- appends without a handle -----------------------------------------------------------

    def _put(
        self,
        fragments: Sequence[Fragment],
        app_version: int | None,
        resume: str,
        *,
        is_fence: bool = False,
    ) -> int:
        if self.store.syncs:  # in an object store this would be a request for each table
            self.ensure_unreplaced()
        token = uuid.uuid4().hex
        stamps = self._stamps(token, resume, is_fence=is_fence)
        content = commit_text(fragments, stamps, self._app_transactions(app_version))
        limit = self._allowance.limit()
        for _ in range(ATTEMPTS):
            self.ensure_writable()
            failure: OSError | None = None
            try:
                is_ours = self.store.put_if_absent(
                    commit_path(self.folder, self._version + 1), content
                )
            except OSError as error:
                is_ours, failure = False, error
                self._doubt(self._version + 1)
            known = self._version
            if is_ours:
                self._version += 1
                self._last_put = self._version, token
                committed: int | None = self._version
            else:
                committed = self._read_intervening(token, failure, limit)
            if committed is not None:
                # The content was durable before the name existed.
                with storage_faults(self.uri):
                    self.store.sync(f"{self.folder}/_delta_log", [])
                return self._done(committed, app_version)
            if failure is not None:
                raise storage_fault(failure, self.uri) from failure
            if self._version == known and not self.store.syncs:  # two puts conflict (S3: 409)
                self._doubt(known + 1)  # the other put may be an earlier attempt of this process
                what = f"lake table {self.uri}: the store refused a commit though none exists there"
                raise LogConflictError(what, reason="storage")
        raise self._outrun_error()

    def _done(self, committed: int, app_version: int | None) -> int:
        self._table = None
        self._allowance.note_current()
        self._writer.forget_conflicts(self.folder)
        if app_version is not None:
            self._app_version, self._knows_app_version = app_version, True
        self.checkpoints.write_if_due(committed, self.uri, self.checkpoint)
        return committed

    def _next_bytes(self, failure: OSError | None) -> int | None:
        """Return the size of the next commit, if any; if unknown, raise the fault of the put."""
        try:
            return self.commit_bytes(self._version + 1)
        except IngestdError:
            if failure is None:
                raise
            raise storage_fault(failure, self.uri) from failure

    def _read_intervening(
        self, token: str, failure: OSError | None, limit: ReadingLimit
    ) -> int | None:
        """Read the commits since this version, without listing; return our own if it exists."""
        ours: int | None = None
        known, is_changed = self._version, False
        try:
            while (nbytes := self._next_bytes(failure)) is not None:
                limit.spend(nbytes, self.uri)
                version = self._version + 1
                commit = self._commit_at(version)
                author = self._conflicts.judge(self, version, commit, token, self.schema())
                if author is CommitAuthor.OURS:
                    ours = version
                self._version = version
                is_changed |= commit.alters
        finally:  # ours follow them
            self._sync(*range(known + 1, self._version + 1))
        self._allowance.note_current()
        if self._version > known:
            self._table = None
        if is_changed:
            _ = self.handle  # at the last commit that was judged
            self._read_state()
        return ours

    def checkpoint(self) -> None:
        """Write a checkpoint of the newest version."""
        log = f"{self.folder}/_delta_log"
        with storage_faults(self.uri):
            table = self._present()
            reach("sink.checkpoint.before")
            with self.store.calls.during(self.store, log):
                table.create_checkpoint()
            reach("sink.checkpoint.after")
            name = f"{table.version():020}.checkpoint.parquet"
            self.store.sync(log, [name, "_last_checkpoint"])

    # --- commits by deltalake ---------------------------------------------------------------

    def _append(
        self,
        fragments: Sequence[Fragment],
        token: str,
        app_version: int | None,
        resume: str,
        *,
        is_fence: bool = False,
    ) -> None:
        self.handle.create_write_transaction(
            [add_action(f) for f in fragments],
            "append",
            self.handle.schema(),
            commit_properties=self._properties(
                token, app_version, resume, len(fragments), is_fence=is_fence
            ),
            post_commithook_properties=_NO_CLEANUP,
        )

    def _properties(
        self,
        token: str,
        app_version: int | None,
        resume: str = "",
        files: int | None = None,
        *,
        is_fence: bool = False,
    ) -> CommitProperties:
        # No last_updated: with it, log cleanup may drop the transaction (I3).
        transactions = [Transaction(*each) for each in self._app_transactions(app_version)]
        stamps = self._stamps(token, resume, is_fence=is_fence)
        if files is not None:
            stamps[HOLDS] = str(files + len(transactions))
        return CommitProperties(
            custom_metadata=stamps,
            max_commit_retries=0,
            app_transactions=transactions or None,
        )

    def _app_transactions(self, app_version: int | None) -> list[tuple[str, int]]:
        return [] if app_version is None else [(self.app_id, app_version)]

    def _stamps(self, token: str, resume: str, *, is_fence: bool = False) -> dict[str, str]:
        stamps = {TOKEN: token, WRITER: self._writer.name, RESUME: resume, FENCE: "true"}
        left_out = {RESUME: not resume, FENCE: not is_fence}
        return {name: text for name, text in stamps.items() if not left_out.get(name)}

    def _commit(self, attempt: Callable[[str], None]) -> int:
        if self.store.syncs:
            self.ensure_unreplaced()
        token, limit = uuid.uuid4().hex, self._allowance.limit()
        for _ in range(ATTEMPTS):
            with storage_faults(self.uri):
                # deltalake reads what other programs put there, and writes through a link
                ensure_readable_log(self.store, self.folder, above=self._version)
            if self.exists:
                self.ensure_writable()
                _ = self.handle  # at this version
            expected = self._version + 1
            failure: Exception | None = None
            try:
                with self.store.calls.during(self.store, self.folder):
                    attempt(token)
            except Exception as error:
                if not is_library_error(error):
                    raise
                failure = error
                self._doubt(expected)
            committed = self._read_since(expected, token, failure, limit)
            if committed is not None:
                self._sync(committed)
                self._allowance.note_current()
                return committed
            if failure is None or self._version < expected:
                # Nothing came between: the failure is the storage's own.
                raise storage_fault(failure or OSError("commit not found"), self.uri) from failure
        raise self._outrun_error() from failure

    def _doubt(self, version: int) -> None:
        if not self.store.syncs:  # on a local file system a failed commit can't appear later
            self._writer.doubt(self.folder, version)

    def _outrun_error(self) -> FolderError:
        return BusyLogError(
            f"lake table {self.uri}: another commit came first {ATTEMPTS} times in a row"
        )

    def _read_since(
        self, expected: int, token: str, failure: Exception | None, limit: ReadingLimit
    ) -> int | None:
        """Refresh the handle and read the commits from `expected` on; return our own's version."""
        before = self.schema()
        self._refresh(must_reopen=failure is not None)
        if failure is None and expected == self._version:
            return expected  # compare-and-swap: it can't be another writer's
        ours, judged = None, expected
        try:
            for version in range(expected, self._version + 1):
                limit.spend(self.commit_bytes(version) or 0, self.uri)
                commit = self._commit_at(version)
                author = self._conflicts.judge(self, version, commit, token, before)
                if author is CommitAuthor.OURS:
                    ours = version
                judged = version + 1
        finally:  # ours follow them
            self._sync(*range(expected, judged))
        return ours

    def _refresh(self, *, must_reopen: bool) -> None:
        self._commits += 1
        has_checkpoint = (self._version + 1) % CHECKPOINT_INTERVAL == 0  # it is all that is read
        if self._table is None or must_reopen or has_checkpoint or self._commits >= REOPEN_EVERY:
            self._commits = 0
            self.load()
            return
        with storage_faults(self.uri), self.store.calls.during(self.store, self.folder):
            self._table.update_incremental()  # the log was checked just before the commit
        self._version = self._table.version()
        self._read_state()
