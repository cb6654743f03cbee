"""Checks of a `_delta_log` before deltalake reads it.

deltalake walks through all folders in it, whatever their names, follows links, blocks on pipes,
holds what it reads in memory several times, and dies of deep nesting (see `log_nesting`). So a log
is a list of regular files, and of folders that contain only regular files. Another program may put
other files there between a check and the opening; then the process dies once, and the next start
reports the table.

The limits are far above what ingestd writes (measured). With 1,600 columns whose names have 63
bytes, the first commit of a table has 0.9 MB. Each data file takes 0.7 kB of a commit including
statistics, 20 kB at most, and 0.2 kB of a checkpoint. So a commit has room for a transaction of
terabytes. A larger file was written by another program, and deltalake would hold several copies of
it in memory.
"""

from __future__ import annotations

import re
from contextlib import suppress

import pyarrow as pa
from deltalake import DeltaTable

from ingestd.lake.delta.log_nesting import (
    FEW_BRACKETS,
    ensure_shallow_checkpoint,
    ensure_shallow_json,
    ensure_shallow_parquet,
)
from ingestd.lake.store.paths import FolderEntry, OddFileError, why_odd
from ingestd.lake.store.plain_files import LOG, ensure_size
from ingestd.lake.store.store import Store
from ingestd.model.recorded import RecordError, read_json

MOST_COMMIT_BYTES = 32 << 20
MOST_CHECKPOINT_BYTES = 512 << 20
POINTER = "_last_checkpoint"
MOST_POINTER_BYTES = MOST_COMMIT_BYTES
MOST_POINTER_VALUES = 200_000
"""Delta's own pointer may have the checkpoint's schema: 16 values for each of 1,600 columns."""
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.parquet\Z")
_OF_VERSION = re.compile(r"(?:\d{20}\.)?(\d{20})\.[^/]*(json|parquet)\Z")
"""The files that deltalake reads for a version: commits, also compacted, and checkpoints."""
_READ = re.compile(r"\d{20}\.|_last_checkpoint\Z")
SIDECARS = "_sidecars"


def open_table(store: Store, folder: str, version: int | None = None) -> DeltaTable:
    """Open the table in `folder` at a version, by default the newest.

    Raise OddFileError, and whatever deltalake raises.
    """
    ensure_readable_log(store, folder, opened=version)
    options = store.storage_options
    with store.calls.during(store, folder):
        return DeltaTable(store.uri(folder), version=version, storage_options=options)


def ensure_readable_log(
    store: Store, folder: str, above: int = -1, *, opened: int | None = None
) -> None:
    """Raise OddFileError if deltalake can't read a log safely.

    That is so if it contains anything but files and folders of files, or a file too large or
    nested too deep for a log.
    `above`: versions up to this one were checked before and are skipped. `opened`: the version
    that will be read, by default the newest. In an object store this costs up to four requests,
    and one for each commit of more than FEW_BRACKETS bytes.
    """
    log = f"{folder}/{LOG}"
    if store.is_link(log):  # raises if a parent folder is a link
        raise OddFileError(store.uri(log), "is a symbolic link")
    from_name = f"{above:020}~" if above >= 0 else ""
    if above < 0 and not store.syncs:
        above = _checkpoint(store, log)
        is_before = opened is not None and opened < above
        from_name = f"{above:020}" if above >= 0 and not is_before else ""
    entries = _ensure_plain(store, log, from_name)
    _ensure_shallow(store, log, entries, opened)


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
    return -1 if store.size(path) is None else version.integer()


def _ensure_plain(
    store: Store, folder: str, above: str, *, may_have_folders: bool = True
) -> list[FolderEntry]:
    """Return the entries of a log, which are files of a size that files of a log have."""
    entries = store.entries(folder, above)
    for entry in entries:
        shown = f"{store.uri(folder)}/{entry.name}"
        if why_odd(entry.name) is not None:  # deltalake then lists nothing
            raise OddFileError(shown, "has a name that no file in a lake has")
        if entry.odd is not None:
            is_folder = entry.odd == "is a folder" and may_have_folders
            if not is_folder or _READ.match(entry.name):
                raise OddFileError(shown, entry.odd)
            _ensure_plain(store, f"{folder}/{entry.name}", "", may_have_folders=False)
        elif entry.name.startswith("."):  # no reader opens these
            continue
        elif entry.name.endswith(".json"):
            ensure_size(shown, entry.size_bytes, MOST_COMMIT_BYTES)
        elif entry.name.endswith(".parquet") or ".checkpoint." in entry.name:
            ensure_size(shown, entry.size_bytes, MOST_CHECKPOINT_BYTES)
        elif _READ.match(entry.name):
            ensure_size(shown, entry.size_bytes, MOST_COMMIT_BYTES)
    return entries


def _ensure_shallow(store: Store, log: str, entries: list[FolderEntry], opened: int | None) -> None:
    """Check the files that deltalake reads: those since the newest checkpoint of one file.

    It prefers later checkpoints of other forms, and never uses an earlier one.
    """
    found = [(int(m[1]), e) for e in entries if (m := _OF_VERSION.match(e.name))]
    found = [(v, e) for v, e in found if opened is None or v <= opened]
    first = max((v for v, e in found if _CHECKPOINT.match(e.name)), default=-1)
    sidecars: set[str] = set()
    for version, entry in found:
        path = f"{log}/{entry.name}"
        if version < first:
            continue
        with suppress(FileNotFoundError):  # cleaned up meanwhile
            if ".checkpoint." in entry.name:
                sidecars |= sidecars_of(store, path)
            elif entry.size_bytes > FEW_BRACKETS:  # bytes: nearly all commits have fewer
                ensure_shallow_json(store.read(path, MOST_COMMIT_BYTES), store.uri(path))
    for sidecar in sidecars:
        with suppress(FileNotFoundError):
            sidecars_of(store, f"{log}/{SIDECARS}/{sidecar}")


def sidecars_of(store: Store, path: str) -> set[str]:
    """Check a checkpoint, or a part of one, and return the names of its sidecars."""
    uri = store.uri(path)
    if path.endswith(".json"):
        return ensure_shallow_checkpoint(store.read(path, MOST_COMMIT_BYTES), uri)
    # Read in full from an object store, whose faults are not the file's.
    with store.open(path) if store.syncs else _read(store, path) as source:
        return ensure_shallow_parquet(source, uri)


def _read(store: Store, path: str) -> pa.NativeFile:
    return pa.BufferReader(store.read(path, MOST_CHECKPOINT_BYTES))
