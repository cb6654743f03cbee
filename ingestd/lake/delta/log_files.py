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

MOST_COMMIT_BYTES = 32 << 20
MOST_CHECKPOINT_BYTES = 512 << 20
_READ = re.compile(r"\d{20}\.|_last_checkpoint\Z")
_WITH_FILES = frozenset({"_sidecars", "_staged_commits", "_commits"})
"""Subfolders of a log with further parts of it."""


def open_table(store: Store, folder: str, version: int | None = None) -> DeltaTable:
    """Open the table in `folder` at a version, by default the newest.

    Raise OddFileError, and whatever deltalake raises.
    """
    ensure_plain_log(store, folder)
    options = store.storage_options
    with store.calls.during(store, folder):
        return DeltaTable(store.uri(folder), version=version, storage_options=options)


def ensure_plain_log(store: Store, folder: str, above: int = -1) -> None:
    """Raise OddFileError if a log contains anything but files, or a file too large for a log.

    `above`: versions up to this one were checked before and are skipped.
    """
    log = f"{folder}/{LOG}"
    if store.is_link(log):  # raises if a parent folder is a link
        raise OddFileError(store.uri(log), "is a symbolic link")
    _ensure_plain(store, log, f"{above:020}~" if above >= 0 else "")


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
