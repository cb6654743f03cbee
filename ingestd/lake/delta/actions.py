"""The commits that ingestd writes to a Delta log, and the metadata keys in their commitInfo.

Source: Delta protocol, "Actions".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ingestd import __version__
from ingestd.ports import Fragment

TOKEN = "ingestdCommit"  # noqa: S105 - a key in commitInfo
RESUME = "ingestdResume"
"""Key for the position from which the capture resumes once this commit is durable."""
WRITER = "ingestdWriter"
"""Key for the process that made the commit."""
FENCE = "ingestdFence"
"""Key of a fence: after this commit, writers that read the log before it can't commit (I5)."""
HOLDS = "ingestdHolds"
"""Key for the number of files and app transactions in the commit: detects a truncated commit."""

CONTENT = "ingestdContent"
"""Key for the digest of all rows of that version, of a reference table."""
COMPACTION = "ingestdCompaction"
"""Key for the token of a commit of maintenance."""
OPERATION, USER_METADATA = "operation", "userMetadata"
"""Keys of other writers, which the Spark jobs read."""
STAMPS = frozenset(
    {TOKEN, RESUME, WRITER, FENCE, HOLDS, CONTENT, COMPACTION, OPERATION, USER_METADATA}
)
"""The keys of commitInfo that are kept of a commit."""


def commit_text(
    fragments: Sequence[Fragment], stamps: Mapping[str, str], carried: Sequence[tuple[str, int]]
) -> bytes:
    """Return a commit that adds files; `carried`: app transactions, name and version."""
    stamps = {**stamps, HOLDS: str(len(fragments) + len(carried))}
    actions = [_info("WRITE", {"mode": "Append", "partitionBy": "[]"}, stamps)]
    actions += ({"txn": {"appId": app_id, "version": number}} for app_id, number in carried)
    actions += (_add(f, is_change=True) for f in fragments)
    return _lines(actions)


def rewrite_text(
    fragments: Sequence[Fragment], removed: Mapping[str, int], stamps: Mapping[str, str]
) -> bytes:
    """Return a commit that replaces files (path, bytes) by others with the same rows."""
    now_ms = time.time_ns() // 1_000_000
    stamps = {**stamps, HOLDS: str(len(fragments))}
    actions = [_info("OPTIMIZE", {"predicate": "[]"}, stamps)]
    actions += (
        {
            "remove": {
                "path": path,
                "deletionTimestamp": now_ms,
                "dataChange": False,
                "extendedFileMetadata": True,
                "partitionValues": {},
                "size": nbytes,
            }
        }
        for path, nbytes in removed.items()
    )
    actions += (_add(f, is_change=False) for f in fragments)
    return _lines(actions)


def _info(
    operation: str, parameters: Mapping[str, str], stamps: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "commitInfo": {
            "timestamp": time.time_ns() // 1_000_000,
            "operation": operation,
            "operationParameters": parameters,
            "engineInfo": f"ingestd/{__version__}",
            **stamps,
        }
    }


def _add(fragment: Fragment, *, is_change: bool) -> dict[str, Any]:
    return {
        "add": {
            "path": fragment.path,
            "partitionValues": {},
            "size": fragment.size_bytes,
            "modificationTime": fragment.modification_time_ms,
            "dataChange": is_change,
            "stats": fragment.statistics,
        }
    }


def _lines(actions: Sequence[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(action, separators=(",", ":")) for action in actions)
    return "".join(f"{line}\n" for line in lines).encode()
