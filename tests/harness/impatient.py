"""The daemon with short delays: it soon checks again for faults that an operator fixed.

``python -m tests.harness.impatient run ...`` is ``ingestd run ...`` with these delays.
"""

from __future__ import annotations

from functools import partial

from ingestd.app import daemon
from ingestd.app.build import SourceBuilder
from ingestd.app.lakes import LAKES
from ingestd.cli import main
from ingestd.lake.factory import DeltaLakeFactory
from ingestd.model.backoff import Backoff
from ingestd.pipeline.retry import RetryPolicy
from ingestd.postgres.connection.liveness import LivenessCheckedConnection, LivenessPolicy

OPERATOR_DELAY_S = 1.0
SILENT_S = 1.0
"""Patience with a silent server; in total it gets a few seconds."""
STORAGE_S = 5.0
"""Time limit of a storage call."""


def impatient() -> None:
    retry = RetryPolicy(Backoff(0.5, OPERATOR_DELAY_S), operator_delay_s=OPERATOR_DELAY_S)
    daemon.SourceBuilder = partial(  # type: ignore[attr-defined, assignment]
        SourceBuilder, retry=retry
    )
    LAKES["delta"] = partial(DeltaLakeFactory, storage_patience_s=STORAGE_S)
    LivenessCheckedConnection.liveness = LivenessPolicy(
        silent_s=SILENT_S, again_s=SILENT_S, probe_interval_s=0.7, ask_after_s=SILENT_S
    )
    main()


if __name__ == "__main__":
    impatient()
