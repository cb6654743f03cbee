"""The choice of small files to join, and of log files to remove. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL_SHARE = 4
"""A file below a quarter of the target size is small."""
LEAST_FILES = 8
"""Fewer are not joined: each would be rewritten with every new file."""
MOST_FILES = 500
"""In one commit: an append that loses against it must read it, which takes 4 ms at this size."""
CHECKPOINTS_APART = 5000
"""Commits between the checkpoints that are kept for readers of earlier versions."""
NEWEST_CHECKPOINTS = 3
"""Number of newest checkpoints that are always kept: a reader may be about to open one."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live file: path inside the table, bytes, statistics, time of writing (ms)."""

    path: str
    size_bytes: int
    statistics: Mapping[str, Any]
    written_ms: int = 0

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key of its rows: epoch and position if the statistics have them, else its age."""
        low = self.statistics.get("minValues") or {}
        epoch = low.get("_cdc_epoch", low.get("epoch"))
        return (epoch or 0, low.get("_cdc_lsn") or 0, self.written_ms, self.path)


def small_files(files: Iterable[DataFile], target_bytes: int) -> list[DataFile]:
    """Return the small files in the order of their rows."""
    found = (f for f in files if f.size_bytes < target_bytes // SMALL_SHARE)
    return sorted(found, key=lambda f: f.order)


def pieces(files: Iterable[DataFile], target_bytes: int) -> list[list[DataFile]]:
    """Return the runs of small files that should each become one, in the order of their rows.

    None is larger than the target or has more than MOST_FILES. A file that is more than half of its
    piece is left out: so a byte is rewritten only when the size of its file at least doubles.
    """
    runs: list[list[DataFile]] = [[]]
    nbytes = 0
    for file in small_files(files, target_bytes):
        if nbytes + file.size_bytes > target_bytes or len(runs[-1]) == MOST_FILES:
            runs.append([])
            nbytes = 0
        runs[-1].append(file)
        nbytes += file.size_bytes
    return [piece for run in runs if len(piece := _without_large(run)) >= LEAST_FILES]


def _without_large(run: Sequence[DataFile]) -> list[DataFile]:
    left, nbytes = list(run), sum(f.size_bytes for f in run)
    while left:
        largest = max(left, key=lambda f: f.size_bytes)
        if largest.size_bytes * 2 <= nbytes:
            break
        left.remove(largest)
        nbytes -= largest.size_bytes
    return left


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files of a `_delta_log`: when each commit and checkpoint was written (Unix seconds)."""

    commits: Mapping[int, float]
    checkpoints: Mapping[int, float]

    @property
    def newest(self) -> int:
        """The last version, -1 if there is none."""
        return max(self.commits, default=-1)


def cut_of(log: LogFiles, written_before_s: float, kept: int) -> int | None:
    """Return the version with which the log can begin; None if nothing may be removed.

    It has a checkpoint and was written before that time, so that every later version can still be
    read. It is not above `kept`, a commit that is still needed.
    """
    able = [
        version
        for version, at in log.checkpoints.items()
        if version <= kept
        and at < written_before_s
        and log.commits.get(version, written_before_s) < written_before_s
    ]
    return max(able, default=None)


def needless_checkpoints(log: LogFiles, cut: int | None, written_before_s: float) -> list[int]:
    """Return the checkpoints that no reader needs: below the cut, or close to one that is kept.

    Those written after that time are kept: a reader may be using one.
    """
    own = sorted(log.checkpoints)
    last = cut if cut is not None else (own[0] if own else 0)
    needless = [version for version in own if version < last]
    for version in own[:-NEWEST_CHECKPOINTS]:
        if version <= last:
            continue
        if version - last < CHECKPOINTS_APART and log.checkpoints[version] < written_before_s:
            needless.append(version)
        else:
            last = version
    return needless
