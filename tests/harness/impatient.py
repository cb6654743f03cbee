"""The daemon with short delays: it soon checks again for faults that an operator fixed.

``python -m tests.harness.impatient run ...`` is ``ingestd run ...`` with these delays.
"""

from __future__ import annotations

from ingestd.cli import main
from ingestd.lake.store import pending_calls as storage_calls
from ingestd.model.backoff import Backoff
from ingestd.pipeline import retry as retrying
from ingestd.postgres.connection import liveness as watched
from ingestd.postgres.wal import replication_stream as stream

OPERATOR_DELAY_S = 1.0
SILENT_S = 1.0
"""Patience with a silent server; in total it gets a few seconds."""
STORAGE_S = 5.0
"""Time limit of a storage call."""


def impatient() -> None:
    retrying.OPERATOR_DELAY_S = OPERATOR_DELAY_S
    retrying.TRANSIENT = Backoff(0.5, OPERATOR_DELAY_S)
    watched.SILENT_S = watched.AGAIN_S = SILENT_S
    watched.LOOK_EVERY_S = 0.7
    stream.ASK_AFTER_S = SILENT_S
    storage_calls.PATIENCE_S = STORAGE_S
    main()


if __name__ == "__main__":
    impatient()
