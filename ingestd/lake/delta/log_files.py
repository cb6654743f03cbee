"""Checks of a `_delta_log` before deltalake reads it: deltalake blocks on pipes and follows links.

The limits are far above what ingestd writes (measured). With 1,600 columns whose names have 63
bytes, the first commit of a table has 0.9 MB. Each data file takes 0.7 kB of a commit including
statistics, 20 kB at most, and 0.2 kB of a checkpoint. So a commit has room for a transaction of
terabytes. A larger file was written by another program, and deltalake would hold several copies of
it in memory.
"""

from __future__ import annotations

import re

from deltalake import DeltaTable

from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import LOG, ensure_size
from ingestd.lake.store.store import Store
from ingestd.model.recorded import RecordError, read_json

MOST_COMMIT_BYTES = 32 << 20
MOST_CHECKPOINT_BYTES = 512 << 20
POINTER = "_last_checkpoint"
MOST_POINTER_BYTES = MOST_COMMIT_BYTES
MOST_POINTER_VALUES = 200_000
"""Delta's own pointer may have the checkpoint's schema: 16 values for each of 1,600 columns."""
_READ = re.compile(r"\d{20}\.|_last_checkpoint\Z")
_WITH_FILES = frozenset({"_sidecars", "_staged_commits", "_commits"})
"""Subfolders of a log with further parts of it."""


def open_table(store: Store, folder: str, version: int | None = None) -> DeltaTable:
    """Open the table in `folder` at a version, by default the newest.

    Raise OddFileError, and whatever deltalake raises.
    """
    ensure_plain_log(store, folder, opened=version)
    options = store.storage_options
    with store.calls.during(store, folder):
        return DeltaTable(store.uri(folder), version=version, storage_options=options)


def ensure_plain_log(
    store: Store, folder: str, above: int = -1, *, opened: int | None = None
) -> None:
    """Raise OddFileError if a log contains anything but files, or a file too large for a log.

    `above`: versions up to this one were checked before and are skipped. `opened`: the version
    that will be read, by default the newest. In an object store this costs three requests, through
    deltalake alone one for each version since the checkpoint and up to five; with `above` one for
    each later version and up to two.
    """
    log = f"{folder}/{LOG}"
    if store.is_link(log):  # raises if a parent folder is a link
        raise OddFileError(store.uri(log), "is a symbolic link")
    if store.syncs:
        _ensure_plain(store, log, f"{above:020}~" if above >= 0 else "")
    else:
        _ensure_small_objects(store, log, above, opened)


def _ensure_small_objects(store: Store, log: str, above: int, opened: int | None) -> None:
    """Check the objects that deltalake reads: not those before the checkpoint that it is led to."""
    if above < 0:
        above = _checkpoint(store, log)
        above = -1 if opened is not None and opened < above else above
        if above < 0 or store.lists_from:
            _ensure_plain(store, log, f"{above:020}" if above >= 0 else "")
            return
    while (nbytes := store.size(path := f"{log}/{above + 1:020}.json")) is not None:
        ensure_size(store.uri(path), nbytes, MOST_COMMIT_BYTES)
        above += 1


def _checkpoint(store: Store, log: str) -> int:
    """Return the version of the checkpoint that the pointer names; -1 if it names none.

    deltalake may ignore the pointer: then it reads the log from the start, so all of it counts.
    """
    try:
        pointer = store.read(f"{log}/{POINTER}", MOST_COMMIT_BYTES)
        version = read_json(pointer, MOST_POINTER_BYTES, MOST_POINTER_VALUES).field("version")
        path = f"{log}/{version.integer():020}.checkpoint.parquet"
    except (FileNotFoundError, RecordError):
        return -1
    nbytes = store.size(path)
    if nbytes is None:
        return -1
    ensure_size(store.uri(path), nbytes, MOST_CHECKPOINT_BYTES)
    return version.integer()


def _ensure_plain(store: Store, folder: str, above: str) -> None:
    for entry in store.entries(folder, above):
        shown = f"{store.uri(folder)}/{entry.name}"
        if entry.name.startswith("."):  # no reader opens these
            continue
        if entry.odd is None:
            if entry.name.endswith(".parquet") or ".checkpoint." in entry.name:
                ensure_size(shown, entry.size_bytes, MOST_CHECKPOINT_BYTES)
            elif _READ.match(entry.name) or entry.name.endswith(".json"):
                ensure_size(shown, entry.size_bytes, MOST_COMMIT_BYTES)
        elif entry.odd != "is a folder" or _READ.match(entry.name):
            raise OddFileError(shown, entry.odd)
        elif entry.name in _WITH_FILES:
            _ensure_plain(store, f"{folder}/{entry.name}", "")
