"""Daemons in the states in which the status page is tested, with an hour of history."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.history import INTERVAL_S, POINTS_KEPT, SourceHistories
from ingestd.observe.status import DaemonStatus, ReferenceStatus, SourceState, SourceStatus
from ingestd.ports import CaptureLag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAMES = (
    "orders",
    "order_lines",
    "customers",
    "addresses",
    "products",
    "prices",
    "stock",
    "shipments",
    "invoices",
    "payments",
    "refunds",
    "carts",
    "sessions",
    "reviews",
    "suppliers",
    "warehouses",
)
GB = 10**9


class Hour:
    """A source's last hour, simulated in ten-second steps up to now."""

    def __init__(self, name: str, tables: Sequence[str], *, seed: int = 1) -> None:
        self.now = datetime.now(UTC)
        self.begin = self.now - timedelta(seconds=INTERVAL_S * (POINTS_KEPT - 1))
        self.source = SourceStatus(name, self.begin)
        self.source.enter(SourceState.STREAMING, self.begin)
        self.source.resumed(epoch=18_200, end_lsn=Lsn(0x3F_0000_0000))
        self.random = np.random.default_rng(seed)
        self.history = SourceHistories()
        for table in tables:
            self.source.table(table, TableState.LIVE, self.begin)

    def live(
        self,
        lag_s: Callable[[float], float],
        rows_per_s: Callable[[float], float],
        *,
        wal: Callable[[float], float] | None = None,
        safe_bytes: int | None = 40 * GB,
    ) -> Hour:
        """Simulate lag, throughput and the lag's WAL (bytes), as functions of minutes 0 to 60."""
        live = [t.table for t in self.source.tables.values() if t.state is TableState.LIVE]
        for n in range(POINTS_KEPT):
            at = self.begin + timedelta(seconds=INTERVAL_S * n)
            minute = n / 6
            noise = float(self.random.uniform(0.8, 1.25))
            lag, rows = lag_s(minute) * noise, int(rows_per_s(minute) * INTERVAL_S * noise)
            behind = int((wal(minute) if wal else lag * 400_000) * noise)
            self._epoch(at, lag, rows, live)
            held = behind + 30_000_000
            safe = None if safe_bytes is None else safe_bytes - held
            end = self.source.end_lsn or Lsn(0)
            measured = CaptureLag(Lsn(end + behind), end, behind, held, safe, wal_status="reserved")
            self.source.measured(measured, lag, at)
            self.history.observe({self.source.source: self.source}, at)
        return self

    def _epoch(self, at: datetime, lag: float, rows: int, live: Sequence[str]) -> None:
        if not rows or not live:
            return
        chosen = self.random.choice(len(live), min(5, len(live)), replace=False)
        shares = {live[i]: max(1, rows // len(chosen)) for i in chosen}
        end = Lsn((self.source.end_lsn or 0) + rows * 180)
        self.source.received(end)
        self.source.confirmed(end)
        self.source.committed(
            self.source.epoch + 1,
            end,
            at,
            transactions=max(1, rows // 40),
            rows=shares,
            ages_s=np.sort(self.random.gamma(4, 0.12 + lag / 8, 200))[::-1],
            nbytes=rows * 140,
            commit_s=float(self.random.uniform(0.02, 0.12)),
        )


def daemon(*hours: Hour) -> tuple[DaemonStatus, SourceHistories]:
    """Combine sources into one daemon."""
    status = DaemonStatus("0.1.0", hours[0].begin - timedelta(days=3, hours=7))
    history = SourceHistories()
    for hour in hours:
        status.sources[hour.source.source] = hour.source
        history.sources |= hour.history.sources
    return status, history


def _shop() -> Hour:
    return Hour("shop", [f"public.{name}" for name in NAMES])


def _daily(minute: float) -> float:
    return 900 + 500 * math.sin(minute / 9) + (1500 if 30 < minute < 34 else 0)


def healthy() -> tuple[DaemonStatus, SourceHistories]:
    shop = _shop().live(lambda m: 2.6 if 30 < m < 34 else 1.1, _daily)
    crm = Hour("crm", ["public.accounts", "public.contacts"], seed=2)
    crm.live(lambda _: 0.9, lambda m: 40 + 10 * math.sin(m / 4), safe_bytes=None)
    accounts = ReferenceStatus("public.accounts", "snapshot_plus_cdc", TableState.LIVE, crm.begin)
    accounts.rows, accounts.version, accounts.looked = 48_211, 3_120, crm.now
    crm.source.references["public.accounts"] = accounts
    return daemon(shop, crm)


def lagging() -> tuple[DaemonStatus, SourceHistories]:
    def behind(minute: float) -> float:
        return 1.2 if minute < 35 else (minute - 35) * 22

    shop = _shop()
    shop.live(
        behind,
        lambda m: _daily(m) if m < 35 else 2600,
        wal=lambda m: behind(m) * 58_000_000,
        safe_bytes=40 * GB,
    )
    gone = TransientError(
        "lake s3://lake/shop: 503 SlowDown", reason="storage", remedy="it is retried automatically"
    )
    for _ in range(4):
        shop.source.enter(SourceState.BACKING_OFF, shop.now - timedelta(minutes=21), gone)
        shop.source.enter(SourceState.STREAMING, shop.now - timedelta(minutes=20))
    return daemon(shop)


def stopped() -> tuple[DaemonStatus, SourceHistories]:
    shop = _shop()
    at = shop.begin + timedelta(minutes=41)
    shop.source.table(
        "public.payments",
        TableState.STOPPED,
        at,
        OperatorError(
            "it has no primary key and no REPLICA IDENTITY any more",
            remedy="ALTER TABLE public.payments REPLICA IDENTITY FULL;\n"
            "  then: ingestd snapshot shop public.payments",
        ),
    )
    shop.live(lambda _: 1.1, _daily)
    crm = Hour("crm", ["public.accounts", "public.contacts"], seed=2)
    crm.live(lambda _: 0.9, lambda _: 40)
    crm.source.enter(
        SourceState.STOPPED,
        crm.now - timedelta(minutes=3),
        OperatorError(
            'crm.example:5432: password authentication failed for user "ingestd"',
            remedy="set the password that CRM_DSN has: ALTER ROLE ingestd PASSWORD '...';",
        ),
    )
    return daemon(shop, crm)


def snapshotting() -> tuple[DaemonStatus, SourceHistories]:
    shop = Hour("shop", [f"public.{name}" for name in NAMES[6:]])
    for name in NAMES[:6]:
        shop.source.table(f"public.{name}", TableState.SNAPSHOTTING, shop.begin)
    shop.live(lambda m: 1.4 + m / 90, lambda m: 48_000 if m > 22 else 0)
    reading = {"orders": 0.64, "order_lines": 0.31, "customers": 0.97, "addresses": 0.12}
    for name, ratio in reading.items():
        table = shop.source.tables[f"public.{name}"]
        for n in range(31):
            at = shop.now - timedelta(seconds=60 - 2 * n)
            part = ratio * (0.7 + 0.01 * n)
            table.read(part, int(part * 30e9) if not n else int(ratio * 3e8), at)
    return daemon(shop)


def many(count: int) -> tuple[DaemonStatus, SourceHistories]:
    """Return a source with this many tables, each of which changes all the time."""
    shop = Hour("shop", [f"public.table_{n:04}" for n in range(count)])
    return daemon(shop.live(lambda _: 1.1, _daily))


STATES = {
    "healthy": healthy,
    "lagging": lagging,
    "stopped": stopped,
    "snapshotting": snapshotting,
}
