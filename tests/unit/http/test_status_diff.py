"""What is sent of a status, and what of it is new."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.config.redaction import Redactor
from ingestd.http.status_diff import RedactionCache, StatusDiff
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.history import SourceHistories
from ingestd.observe.status import DaemonStatus, SnapshotOutcome, SourceState, SourceStatus
from tests.harness.examples import examples

T0 = datetime(2026, 1, 2, tzinfo=UTC)
REDACTED = RedactionCache(Redactor(["sesame"]))


class Told:
    """A status, and what one reader has received of it."""

    def __init__(self) -> None:
        self.shop = SourceStatus("shop", T0)
        self.status = DaemonStatus("0.1.0", T0, {"shop": self.shop})
        self.history = SourceHistories()
        self._shown = StatusDiff(REDACTED)

    def update(self) -> dict[str, Any]:
        found = self._shown.update(self.status, self.history, T0)
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]

    def all(self) -> dict[str, Any]:
        return StatusDiff(REDACTED).update(self.status, self.history, T0)


def commit(source: SourceStatus, table: str, rows: int = 1) -> None:
    source.committed(
        source.epoch + 1, Lsn(1), T0, transactions=1, rows={table: rows}, ages_s=np.ones(1)
    )


def test_a_removed_source_is_reported_once_and_may_come_back() -> None:
    told = Told()
    told.update()
    del told.status.sources["shop"]
    assert told.update()["removed"] == ["shop"]
    assert told.update() == {}
    told.status.sources["shop"] = SourceStatus("shop", T0)
    assert told.update()["sources"]["shop"]["state"] == "starting"


def test_the_first_update_is_complete_and_the_next_is_empty() -> None:
    told = Told()
    told.shop.table("public.orders", TableState.LIVE, T0)
    told.history.observe(told.status.sources, T0)
    first = told.update()
    assert (first["version"], first["ready"]) == ("0.1.0", False)
    shop = first["sources"]["shop"]
    assert shop["state"] == "starting"
    assert [t["table"] for t in shop["tables"]] == ["public.orders"]
    assert len(shop["history"]["at"]) == 1
    assert told.update() == {}


def test_only_changes_are_reported() -> None:
    told = Told()
    for n in range(50):
        told.shop.table(f"public.t{n}", TableState.LIVE, T0)
    told.update()
    commit(told.shop, "public.t7", 3)
    told.shop.enter(SourceState.STREAMING, T0)
    new = told.update()
    assert new["ready"] is True
    shop = new["sources"]["shop"]
    assert [(t["table"], t["rows"]) for t in shop["tables"]] == [("public.t7", 3)]
    assert "lag_bytes" not in shop
    assert (shop["state"], shop["epoch"]) == ("streaming", 1)


def test_a_removed_table_is_reported_once() -> None:
    told = Told()
    told.shop.table("public.orders", TableState.LIVE, T0)
    told.update()
    del told.shop.tables["public.orders"]
    assert told.update()["sources"]["shop"] == {"gone": ["public.orders"]}
    assert told.update() == {}


def test_points_come_as_they_are_made() -> None:
    told = Told()
    told.update()
    for _ in range(2):
        told.history.observe(told.status.sources, T0)
    assert len(told.update()["sources"]["shop"]["history"]["at"]) == 2
    assert told.update() == {}


def test_no_secret_is_shown() -> None:
    told = Told()
    fault = OperatorError("password sesame", remedy="say sesame")
    told.shop.enter(SourceState.STOPPED, T0, fault)
    told.shop.table("public.sesame", TableState.STOPPED, T0, fault)
    assert "sesame" not in json.dumps(told.update())
    del told.shop.tables["public.sesame"]
    assert "sesame" not in json.dumps(told.update())


CHANGES: list[Any] = [
    lambda shop: commit(shop, "public.a"),
    lambda shop: commit(shop, "public.b", 5),
    lambda shop: shop.table("public.a", TableState.STOPPED, T0, OperatorError("no key")),
    lambda shop: shop.table("public.a", TableState.SNAPSHOTTING, T0),
    lambda shop: shop.table("public.a", TableState.LIVE, T0, snapshot_lsn=Lsn(9)),
    lambda shop: shop.tables.pop("public.a", None),
    lambda shop: "public.b" in shop.tables and shop.tables["public.b"].read(0.5, 10, T0),
    lambda shop: (
        "public.b" in shop.tables
        and shop.tables["public.b"].end_snapshot(SnapshotOutcome.FAILED, T0, OperatorError("x"))
    ),
    lambda shop: shop.enter(SourceState.STREAMING, T0),
    lambda shop: shop.enter(SourceState.BACKING_OFF, T0, OperatorError("gone")),
]


@examples(50)
@given(st.lists(st.tuples(st.sampled_from(range(len(CHANGES))), st.booleans()), max_size=30))
def test_all_updates_together_equal_a_new_readers_state(steps: list[tuple[int, bool]]) -> None:
    told = Told()
    facts: dict[str, Any] = {}
    tables: dict[str, Any] = {}

    def take() -> None:
        shop = told.update().get("sources", {}).get("shop", {})
        tables.update({t["table"]: t for t in shop.pop("tables", [])})
        for name in shop.pop("gone", []):
            del tables[name]
        facts.update(shop)

    for change, is_told in steps:
        CHANGES[change](told.shop)
        if is_told:
            take()
    take()
    expected = told.all()["sources"]["shop"]
    assert tables == {t["table"]: t for t in expected.pop("tables", [])}
    assert facts == expected


@pytest.mark.parametrize("count", [0, 3])
def test_a_daemon_with_any_number_of_sources_is_reported(count: int) -> None:
    told = Told()
    told.status.sources = {f"s{n}": SourceStatus(f"s{n}", T0) for n in range(count)}
    assert len(told.update().get("sources", {})) == count
