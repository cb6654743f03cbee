"""What is in a commit of a Delta log: read, judged, written.

Source: Delta protocol, "Actions".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from ingestd import __version__
from ingestd.ports import Fragment

TOKEN = "ingestdCommit"  # noqa: S105 - a key in commitInfo
RESUME = "ingestdResume"
"""Beside it: where the capture goes on once this commit is durable."""
WRITER = "ingestdWriter"
"""Beside it: which process made the commit."""
FENCE = "ingestdFence"
"""Beside it: the commit is there to have those fail who read the log before it (I5)."""
HOLDS = "ingestdHolds"
"""Beside it: how many files and app transactions the commit holds, to see that all are there."""


class Interposed(Enum):
    """What a commit that is not the expected one turns out to be."""

    OURS = auto()
    WITHOUT_DATA = auto()
    FENCE = auto()
    FOREIGN = auto()


def judge(commit_json: str, token: str) -> Interposed:
    """Tell from the actions of a commit whose it is and whether it changed data."""
    actions = actions_of(commit_json)
    if any(a.get("commitInfo", {}).get(TOKEN) == token for a in actions):
        return Interposed.OURS
    if any(FENCE in a.get("commitInfo", {}) for a in actions):
        return Interposed.FENCE
    is_stamped = any(TOKEN in a.get("commitInfo", {}) for a in actions)
    return Interposed.FOREIGN if is_stamped or has_data(actions) else Interposed.WITHOUT_DATA


def has_data(actions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a commit changes rows, or carries an app transaction of a daemon."""
    return any(
        action[k].get("dataChange", True)
        for action in actions
        for k in ("add", "remove")
        if k in action
    ) or any(a.get("txn", {}).get("appId", "").startswith("ingestd/") for a in actions)


def writer_of(commit_json: str) -> str | None:
    """Name the process that made a commit; None if it was none of ours."""
    found = (a.get("commitInfo", {}).get(WRITER) for a in actions_of(commit_json))
    return next((writer for writer in found if writer), None)


def is_whole(content: bytes, *, makes_table: bool = False) -> bool:
    """Whether it is a commit, and not what a power cut left of one.

    A file whose content was not durable may be cut anywhere, between two actions too.
    `makes_table`: it is the first of a table.
    """
    try:
        actions = actions_of(content.decode())
    except ValueError:
        return False
    if not all(isinstance(action, dict) for action in actions):
        return False
    stated = next((a["commitInfo"].get(HOLDS) for a in actions if "commitInfo" in a), None)
    held = sum("add" in action or "txn" in action for action in actions)
    if makes_table and not all(any(n in a for a in actions) for n in ("protocol", "metaData")):
        return False
    return bool(actions) and (stated is None or int(stated) == held)


def is_ours(commit_json: str) -> bool:
    """Whether a program of ours made it."""
    return any(TOKEN in a.get("commitInfo", {}) for a in actions_of(commit_json))


def appended_by_another(commit_json: str) -> bool:
    """Whether it changes rows, and no program of ours made it."""
    return has_data(actions_of(commit_json)) and not is_ours(commit_json)


def actions_of(commit_json: str) -> list[dict[str, Any]]:
    """Give a commit's actions: one a line, whatever separators of lines are in a value."""
    return [json.loads(line) for line in commit_json.split("\n") if line.strip()]


def schema_in(commit_json: str) -> str | None:
    """Return the schema that a commit gives its table, as Delta's JSON; None if it gives none."""
    if '"metaData"' not in commit_json:
        return None
    found = (a["metaData"] for a in actions_of(commit_json) if "metaData" in a)
    return next((str(metadata["schemaString"]) for metadata in found), None)


def resume_in(commit_json: str, app_id: str) -> str | None:
    """Give the text that a commit with this app transaction carries; None if it is no such one."""
    actions = actions_of(commit_json)
    if not any(a.get("txn", {}).get("appId") == app_id for a in actions):
        return None
    found = (a.get("commitInfo", {}).get(RESUME) for a in actions)
    return next((text for text in found if text), "")


def app_ids_in(commit_json: str) -> list[str]:
    """Return the app transactions of ours that a commit has, by name."""
    found = (a.get("txn", {}).get("appId", "") for a in actions_of(commit_json))
    return [app_id for app_id in found if app_id.startswith("ingestd/")]


def commit_text(
    fragments: Sequence[Fragment], stamps: Mapping[str, str], carried: Sequence[tuple[str, int]]
) -> bytes:
    """Write a commit that adds files; `carried`: app transactions, name and version."""
    stamps = {**stamps, HOLDS: str(len(fragments) + len(carried))}
    actions = [_info("WRITE", {"mode": "Append", "partitionBy": "[]"}, stamps)]
    actions += ({"txn": {"appId": app_id, "version": number}} for app_id, number in carried)
    actions += (_add(f, is_change=True) for f in fragments)
    return _lines(actions)


def rewrite_text(
    fragments: Sequence[Fragment], removed: Mapping[str, int], stamps: Mapping[str, str]
) -> bytes:
    """Write a commit that puts files in the place of others (path, bytes), the rows being equal."""
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
            "stats": fragment.stats_json,
        }
    }


def _lines(actions: Sequence[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(action, separators=(",", ":")) for action in actions)
    return "".join(f"{line}\n" for line in lines).encode()


def parse_statistics(statistics: str | None) -> dict[str, Any]:
    """Read a file's statistics JSON; empty if it has none."""
    return dict(json.loads(statistics)) if statistics else {}
