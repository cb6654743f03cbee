"""Storage that does not answer: what is reported, and when."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import structlog
from structlog.testing import capture_logs

from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.pending_calls import PATIENCE_S, StorageCalls
from ingestd.lake.store.plain_files import Fsync
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus, ready
from ingestd.observe.status_json import to_json
from ingestd.pipeline.telemetry.storage import StorageTelemetry

if TYPE_CHECKING:
    from pathlib import Path

T0 = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_oldest_call_is_reported_once_it_takes_too_long(tmp_path: Path) -> None:
    clock = Clock()
    calls = StorageCalls(monotonic=clock)
    store = LocalStore(tmp_path, Fsync())
    store.calls = calls
    shop = SourceStatus("shop", T0, SourceState.STREAMING)
    shop.storage = calls.waiting
    status = DaemonStatus("1", T0, {"shop": shop})
    watch = StorageTelemetry(status, structlog.get_logger())
    with capture_logs() as logs:
        with calls.during(store, "shop/public/a"):
            clock.now += PATIENCE_S - 1
            with calls.during(store, "shop/_epochs"):
                watch.report_changes()
                assert ready(status) == (True, [])
                clock.now += 1
                watch.report_changes()
                watch.report_changes()
                is_ready, [why] = ready(status)
                assert not is_ready
                assert why == (
                    f"source shop: the lake's storage has not answered for 15 s:"
                    f" {tmp_path}/shop/public/a"
                )
                told = to_json(status)["sources"]["shop"]["storage_wait"]
                assert told == {"path": f"{tmp_path}/shop/public/a", "seconds": PATIENCE_S}
        watch.report_changes()
        assert ready(status) == (True, [])
    assert [(line["event"], line["path"]) for line in logs] == [
        ("storage.waits", f"{tmp_path}/shop/public/a"),
        ("storage.answered", f"{tmp_path}/shop/public/a"),
    ]


def test_each_call_of_a_store_is_tracked_only_while_it_lasts(tmp_path: Path) -> None:
    seen: list[str] = []

    class Noted(StorageCalls):
        def end_call(self, call: object) -> None:
            found = self.waiting(0.0)
            assert found is not None
            seen.append(found.path)
            super().end_call(call)

    store = LocalStore(tmp_path, Fsync())
    store.calls = Noted()
    store.make_folder("a")
    store.put_if_absent("a/0.json", b"{}")
    with pytest.raises(FileNotFoundError):
        store.read("a/1.json", 9)
    store.sync("a", ["0.json"])
    assert store.calls.waiting(0.0) is None
    assert seen == [f"{tmp_path}/{name}" for name in ("a", "a/0.json", "a/1.json", "a")]
