"""When checkpoints of a Delta log are due; they are written concurrently with the commits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ingestd.model.errors import FolderError, IngestdError

CHECKPOINT_INTERVAL = 20
"""The cost of a commit grows with the commits since the last checkpoint. At version 400 it is 19 ms
with an interval of 100 and 6 ms with 20, checkpoints included."""
CHECKPOINT_EVERY = 100
"""The interval on a disk, where appends need no handle: only opening the table reads the commits
since the checkpoint. In an object store, opening requests each of them several times."""


def turn_of(folder: str) -> int:
    """Return a number for a log, which staggers the checkpoints of logs that grow together."""
    return zlib.crc32(folder.encode())


def run_at_once(work: Callable[[], None]) -> None:
    """Run work where a log has no other thread for it."""
    work()


RunInBackground = Callable[[Callable[[], None]], Future[None] | None]
"""Runs work in another thread and returns its future, or runs it at once and returns None."""


class CheckpointSchedule:
    """The checkpoints of one log, one for `every` versions; at most one is written at a time.

    `turn`: see `turn_of`. `run_in_background`: runs work that need not be awaited, in any thread.
    """

    def __init__(self, *, turn: int, every: int, run_in_background: RunInBackground) -> None:
        self._turn = turn
        self._every = every
        self._run_in_background = run_in_background
        self._running: Future[None] | None = None
        self._fault: IngestdError | None = None

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint is due after this version."""
        return (version + self._turn) % self._every == 0

    def write_if_due(self, version: int, uri: str, write: Callable[[], None]) -> None:
        """Call `write` in the background if a checkpoint is due and none is being written."""
        is_under_way = self._running is not None and not self._running.done()
        if self.is_due(version) and not is_under_way:
            self._running = self._run_in_background(partial(self._write_or_note, uri, write))

    def raise_fault(self) -> None:
        """Raise the error of the last checkpoint, once."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _write_or_note(self, uri: str, write: Callable[[], None]) -> None:
        try:
            write()
        except IngestdError as error:
            self._fault = error
        except BaseException as error:  # noqa: BLE001 - a panic in deltalake is no Exception
            self._fault = FolderError(f"lake table {uri}: checkpoint failed: {error!r}")
