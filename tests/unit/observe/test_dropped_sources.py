"""What a reload leaves: no trace of a removed source, and no secret shown."""

from __future__ import annotations

import numpy as np

from ingestd.config.redaction import Redactor
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import SourceState
from ingestd.ports import CaptureLag

LAG = CaptureLag(Lsn(10), Lsn(4), 6, 7, 8)


def test_no_metric_is_left_of_a_source_that_went() -> None:
    metrics = Metrics()
    for source in ("shop", "shops"):
        metrics.lag(source, LAG, 1.0)
        metrics.source_state(source, SourceState.STREAMING)
        metrics.table_state(source, "public.t", TableState.LIVE)
        metrics.rows(source, "public.t", {"c": 1})
        metrics.restarted(source, "storage")
        metrics.committed(source, transactions=1, commit_seconds=0.1, ages_s=np.array([1.0]))
    before = metrics.text().decode()
    metrics.forget_source("shop")
    left = metrics.text().decode()
    assert 'source="shop"' not in left
    assert left.count('source="shops"') == before.count('source="shops"')
    metrics.forget_source("shop")


def test_what_is_held_for_a_paused_source_has_no_age() -> None:
    metrics = Metrics()
    metrics.lag("shop", LAG, 1.0)
    metrics.set_retained("shop", LAG)
    text = metrics.text().decode()
    assert 'ingestd_slot_retained_bytes{source="shop"} 7.0' in text
    assert 'ingestd_slot_safe_bytes{source="shop"} 8.0' in text
    assert 'ingestd_lag_seconds{source="shop"}' not in text


def test_a_redactor_learns_new_secrets_and_keeps_the_old() -> None:
    redactor = Redactor(["sesame-1"])
    redactor.learn(Redactor(["postgresql://u:sesame-2@h/d"]))
    redactor.learn(Redactor())
    assert redactor.text("sesame-1 or sesame-2") == "*** or ***"
