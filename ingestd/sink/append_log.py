"""A Delta table that one daemon alone appends to, by compare-and-swap (I3, I5).

Source: Delta protocol, "Delta Log Entries", "Transaction Identifiers". Facts about deltalake 1.6
that shape this (all measured): a commit with ``max_commit_retries=0`` goes to the version after the
one that the handle has read, or fails; an error may be raised although the commit went through;
repeated or lower app transaction versions are not refused; a write transaction neither checks nor
changes the schema, nor moves the handle; a handle slows down with the commits it has followed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, create_table_with_add_actions

from ingestd.errors import OperatorError
from ingestd.ports import Fragment
from ingestd.sink.faults import storage_fault, storage_faults
from ingestd.sink.store import Store

CHECKPOINT_INTERVAL = 20
"""A commit costs by the commits since the last checkpoint: at version 400, 19 ms with 100, 6 with
20; the checkpoints themselves are included."""
REOPEN_EVERY = 20
ATTEMPTS = 10
"""How often a commit is tried when others without data (OPTIMIZE) come between."""

_TOKEN = "ingestdCommit"  # noqa: S105 - a key in commitInfo
_RESUME = "ingestdResume"
"""Beside it: where the capture goes on once this commit is durable."""
_RESUMES = "ingestd.resumes"
"""Table property: its commits have such texts. No others need be opened to look for one."""
_NO_CLEANUP = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)


class Interposed(Enum):
    """What a commit that is not the expected one turns out to be."""

    OURS = auto()
    WITHOUT_DATA = auto()
    FOREIGN = auto()


def judge(commit_json: str, token: str) -> Interposed:
    """Tell from the actions of a commit whose it is and whether it changed data."""
    actions = _actions(commit_json)
    if any(a.get("commitInfo", {}).get(_TOKEN) == token for a in actions):
        return Interposed.OURS
    for action in actions:
        changes = any(action[k].get("dataChange", True) for k in ("add", "remove") if k in action)
        writes = action.get("txn", {}).get("appId", "").startswith("ingestd/")
        stamped = _TOKEN in action.get("commitInfo", {})
        if changes or writes or stamped:
            return Interposed.FOREIGN
    return Interposed.WITHOUT_DATA


def _actions(commit_json: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commit_json.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class Creation:
    """How a table comes to be: properties by which deltalake makes it."""

    schema: pa.Schema
    configuration: Mapping[str, str]


class AppendLog:
    """The table in `folder` of `store`. All calls block; one at a time, from any thread.

    `app_id`: the Delta app transaction its commits carry. Raises what `storage_fault` makes of an
    error, and OperatorError when another writer appended.
    """

    def __init__(self, store: Store, folder: str, app_id: str) -> None:
        self.store = store
        self.folder = folder
        self.app_id = app_id
        self._table: DeltaTable | None = None
        self._version = -1
        self._commits = 0

    @property
    def uri(self) -> str:
        """Where it is."""
        return self.store.uri(self.folder)

    @property
    def exists(self) -> bool:
        """Whether `load` found it or a commit made it."""
        return self._table is not None

    @property
    def version(self) -> int:
        """The Delta version last read or committed, -1 if there is no table."""
        return self._version

    @property
    def handle(self) -> DeltaTable:
        """Deltalake's handle, at `version`."""
        assert self._table is not None, f"{self.uri} does not exist"
        return self._table

    def load(self) -> None:
        """Read the newest version."""
        try:
            self._table = DeltaTable(self.uri, storage_options=self.store.storage_options)
        except TableNotFoundError:
            self._table = None
        except (DeltaError, OSError) as error:
            raise storage_fault(error, self.uri) from error
        self._version = -1 if self._table is None else self._table.version()
        self._commits = 0

    def schema(self) -> pa.Schema | None:
        """Arrow schema, None if there is no table."""
        return None if self._table is None else pa.schema(self._table.schema().to_arrow())

    def app_version(self) -> int | None:
        """Version of the app transaction: the watermark."""
        return None if self._table is None else self._table.transaction_version(self.app_id)

    def resume(self) -> str:
        """Read the text that the newest commit of ours carries; empty if it has none.

        Commits without an app transaction of ours (OPTIMIZE, new columns) are looked through; what
        the log has not any more is none.
        """
        if _RESUMES not in self.configuration():
            return ""
        for number in range(self._version, -1, -1):
            if self.store.size(self._log_file(number)) is None:
                return ""
            actions = _actions(self._commit_json(number))
            if any(a.get("txn", {}).get("appId") == self.app_id for a in actions):
                found = (a.get("commitInfo", {}).get(_RESUME) for a in actions)
                return next((text for text in found if text), "")
        return ""

    def configuration(self) -> dict[str, str]:
        """Table properties."""
        return {} if self._table is None else dict(self._table.metadata().configuration)

    def create(
        self,
        creation: Creation,
        fragments: Sequence[Fragment] = (),
        app_version: int | None = None,
        resume: str = "",
    ) -> int:
        """Make the table, with its first rows in the same commit. Gives the version."""
        known = {k: v for k, v in creation.configuration.items() if k.startswith("delta.")}
        schema = Schema.from_arrow(creation.schema)

        def attempt(token: str) -> None:
            if self._table is not None:
                self._append(fragments, token, app_version, resume)
                return
            self.store.make_folder(self.folder)
            create_table_with_add_actions(
                self.uri,
                schema,
                [_add(f) for f in fragments],
                mode="error",
                configuration=known,
                storage_options=self.store.storage_options,
                commit_properties=self._properties(token, app_version, resume),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def add_columns(self, fields: Sequence[pa.Field]) -> int:
        """Add columns, or fields of struct columns; a change without data. Gives the version."""
        added = Schema.from_arrow(pa.schema(fields)).fields

        def attempt(token: str) -> None:
            self.handle.alter.add_columns(
                added,
                commit_properties=self._properties(token, None),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def set_properties(self, properties: Mapping[str, str]) -> int:
        """Set table properties, also ones that Delta does not know. Gives the version."""

        def attempt(token: str) -> None:
            self.handle.alter.set_table_properties(
                dict(properties),
                raise_if_not_exists=False,
                commit_properties=self._properties(token, None),
                post_commithook_properties=_NO_CLEANUP,
            )

        return self._commit(attempt)

    def expect_resumes(self) -> None:
        """Have `resume` look for such texts from now on: once in a table's life, a commit."""
        if _RESUMES not in self.configuration():
            self.set_properties({_RESUMES: "true"})

    def append(
        self, fragments: Sequence[Fragment], app_version: int | None = None, resume: str = ""
    ) -> int:
        """Commit files, and the app transaction; also one of the two alone. Gives the version.

        `resume`: what `resume` reads back, empty for none; only with the app transaction, and
        after `expect_resumes`.
        """
        return self._commit(lambda token: self._append(fragments, token, app_version, resume))

    def _append(
        self, fragments: Sequence[Fragment], token: str, app_version: int | None, resume: str
    ) -> None:
        self.handle.create_write_transaction(
            [_add(f) for f in fragments],
            "append",
            self.handle.schema(),
            commit_properties=self._properties(token, app_version, resume),
            post_commithook_properties=_NO_CLEANUP,
        )

    def _properties(
        self, token: str, app_version: int | None, resume: str = ""
    ) -> CommitProperties:
        # No last_updated: with it, log cleanup may forget the transaction (I3).
        carried = None if app_version is None else [Transaction(self.app_id, app_version)]
        stamps = {_TOKEN: token}
        if resume:
            stamps[_RESUME] = resume
        return CommitProperties(
            custom_metadata=stamps, max_commit_retries=0, app_transactions=carried
        )

    def _commit(self, attempt: Callable[[str], None]) -> int:
        token = uuid.uuid4().hex
        for _ in range(ATTEMPTS):
            expected = self._version + 1
            failure: DeltaError | OSError | None = None
            try:
                attempt(token)
            except (DeltaError, OSError) as error:
                failure = error
            committed = self._follow(expected, token, failure)
            if committed is not None:
                self._sync(committed)
                return committed
            if failure is None or self._version < expected:
                # Nothing came between: the failure is the storage's own.
                raise storage_fault(failure or OSError("commit not found"), self.uri) from failure
        raise OperatorError(
            f"lake table {self.uri}: {ATTEMPTS} commits in a row found another commit in between",
            remedy="run OPTIMIZE, VACUUM and ALTER on it less often",
        ) from failure

    def _follow(self, expected: int, token: str, failure: Exception | None) -> int | None:
        """Read what there is now; give the version of our commit if it is there."""
        self._refresh(anew=failure is not None)
        ours: int | None = None
        for version in range(expected, self._version + 1):
            if failure is None and version == expected == self._version:
                return version  # compare-and-swap: it can't be another's
            verdict = judge(self._commit_json(version), token)
            if verdict is Interposed.FOREIGN:
                raise OperatorError(
                    f"lake table {self.uri}: another writer appended version {version}",
                    remedy="stop the other daemon or job that writes there, or give this source"
                    " another name or lake; only one may write a raw table",
                ) from failure
            if verdict is Interposed.OURS:
                ours = version
        return ours

    def _refresh(self, *, anew: bool) -> None:
        self._commits += 1
        if self._table is None or anew or self._commits >= REOPEN_EVERY:
            self.load()
            return
        with storage_faults(self.uri):
            self._table.update_incremental()
        self._version = self._table.version()

    def _commit_json(self, version: int) -> str:
        with storage_faults(self.uri), self.store.open(self._log_file(version)) as file:
            return bytes(file.read()).decode()

    def _log_file(self, version: int) -> str:
        return f"{self.folder}/_delta_log/{version:020}.json"

    def settle(self) -> None:
        """Make durable what `load` read: a kill may have come between a commit and its fsync (I1).

        Only the last commit can be meant: each is made durable before the next.
        """
        if self.exists:
            self._sync(self._version)

    def _sync(self, version: int) -> None:
        """Make the log durable, up to this commit (I1)."""
        log = f"{self.folder}/_delta_log"
        commit, checkpoint = f"{version:020}.json", f"{version:020}.checkpoint.parquet"
        with storage_faults(self.uri):
            # A kill may have come between a checkpoint and the pointer to it.
            written = (commit, checkpoint, "_last_checkpoint")
            names = [n for n in written if self.store.size(f"{log}/{n}") is not None]
            self.store.sync(log, names)
            if version == 0:
                self.store.sync(self.folder, [])


def _add(fragment: Fragment) -> AddAction:
    return AddAction(
        path=fragment.path,
        size=fragment.size_bytes,
        partition_values={},
        modification_time=fragment.modification_time_ms,
        data_change=True,
        stats=fragment.stats_json,
    )


def parse_statistics(statistics: str | None) -> dict[str, Any]:
    """Read a file's statistics JSON; empty if it has none."""
    return dict(json.loads(statistics)) if statistics else {}
