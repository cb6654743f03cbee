"""Torn files of a Delta log, whose last writes were not durable when the power failed.

Each commit is made durable before the next is begun, so only the newest can be incomplete (*torn*):
truncated or empty; deltalake silently skips an empty one. Checkpoints are made concurrently with
the commits and synced after them: an incomplete checkpoint holds nothing that the commits do not.

Such files are set aside: renamed, never removed, not even by maintenance. No reader opens the new
name. Only the process that holds the source's claim renames them, as another process may be writing
the next commit at that path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from ingestd.lake.delta.commit import is_complete_commit
from ingestd.lake.delta.log_files import (
    MOST_COMMIT_BYTES,
    MOST_POINTER_BYTES,
    MOST_POINTER_VALUES,
    POINTER,
)
from ingestd.lake.store.errors import storage_faults, truncated_log_error
from ingestd.lake.store.store import Store
from ingestd.model.errors import TransientError
from ingestd.model.recorded import RecordError, TruncatedRecordError, read_json

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint.*\.parquet")
_PARQUET = b"PAR1"


class Log(Protocol):
    """The log of the table in `folder` of `store`."""

    store: Store
    folder: str

    @property
    def uri(self) -> str:
        """The location of the table."""
        ...


def set_aside_torn(
    log: Log, accept_torn: Callable[[int], None], *, newest: int | None = None
) -> list[str]:
    """Set aside incomplete files; return their names.

    `accept_torn`: called with the version before a commit is set aside; may refuse by raising.
    `newest`: the newest version of a table that can be opened; without it, the newest commit is
    searched for and checkpoints are examined too. Raise FolderError if an older commit is empty,
    and whatever `storage_fault` makes of an error.
    """
    path = f"{log.folder}/_delta_log"
    with storage_faults(log.uri):
        names = log.store.files(path) if newest is None else [f"{newest:020}.json"]
        commits = sorted(name for name in names if _COMMIT.fullmatch(name))
        found = []
        if commits and log.store.size(f"{path}/{commits[-1]}") is not None:
            content, version = _content(log.store, f"{path}/{commits[-1]}"), _version(commits[-1])
            if not is_complete_commit(content, log.uri, makes_table=version == 0):
                _refuse_two_torn(log, path, version)
                accept_torn(version)
                if _content(log.store, f"{path}/{commits[-1]}") != content:
                    what = f"lake table {log.uri}: commit {version} changed while it was checked"
                    raise TransientError(what, reason="claimed")
                found.append(commits[-1])
        if newest is None and not found:
            found = _torn_checkpoint(log, path, names)
        if newest is not None and not found:
            _refuse_empty(log, path, newest)
        for name in found:
            log.store.set_aside(f"{path}/{name}")
    return found


def _refuse_two_torn(log: Log, path: str, newest: int) -> None:
    """Raise FolderError if the commit before the newest is incomplete, too.

    No power failure leaves two. Each takes one opening of the log, and there may be thousands.
    """
    before = f"{path}/{newest - 1:020}.json"
    if newest == 0 or log.store.size(before) is None:
        return
    if not is_complete_commit(_content(log.store, before), log.uri, makes_table=newest == 1):
        raise truncated_log_error(log.uri, f"commits {newest - 1} and {newest} are incomplete")


def _refuse_empty(log: Log, path: str, newest: int) -> None:
    """Raise FolderError if a commit since the checkpoint is empty: readers would miss its rows.

    A later commit would hide it, as deltalake and Spark silently skip an empty one.
    """
    for version in range(newest - 1, -1, -1):
        size = log.store.size(f"{path}/{version:020}.json")
        if size == 0:
            raise truncated_log_error(log.uri, f"commit {version} is empty")
        if not size or log.store.size(f"{path}/{version:020}.checkpoint.parquet") is not None:
            return


def _version(commit: str) -> int:
    return int(commit.partition(".")[0])


def _content(store: Store, path: str) -> bytes:
    return store.read(path, MOST_COMMIT_BYTES)


def _torn_checkpoint(log: Log, path: str, names: list[str]) -> list[str]:
    """Return the newest checkpoint if it is incomplete, and the pointer to it."""
    checkpoints = sorted(name for name in names if _CHECKPOINT.fullmatch(name))
    found = [name for name in checkpoints[-1:] if not _is_parquet(log.store, f"{path}/{name}")]
    if POINTER in names and (found or not _is_json(log.store, f"{path}/{POINTER}")):
        found.append(POINTER)
    return found


def _is_parquet(store: Store, path: str) -> bool:
    with store.open(path) as file:
        size = file.size()
        if size < 2 * len(_PARQUET):
            return False
        head = file.read(len(_PARQUET))
        file.seek(size - len(_PARQUET))
        return bool(head == _PARQUET == file.read(len(_PARQUET)))


def _is_json(store: Store, path: str) -> bool:
    try:
        read_json(_content(store, path), MOST_POINTER_BYTES, MOST_POINTER_VALUES)
    except TruncatedRecordError:
        return False
    except RecordError:  # not caused by a power failure
        return True
    return True
