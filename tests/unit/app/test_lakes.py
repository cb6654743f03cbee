"""Every kind of lake in the registry runs by its config."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ingestd.app import factories, peek
from ingestd.app.build import SourceBuilder
from ingestd.app.lakes import LAKES, local_tables
from ingestd.config import Config, LakeSettings, load_config
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus
from ingestd.postgres.settings import SETTINGS
from ingestd.testing.fakes.capture import FakeDatabase
from ingestd.testing.fakes.connector import FakeFactory, FakeSettings
from ingestd.testing.fakes.lake import MemoryLakeFactory, MemoryLakeSettings
from tests.unit.lake.rows import AT
from tests.unit.pipeline.fixtures import A, put, until

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

    from ingestd.ports import Connector, LakeFactory

CONFIG = """
[lake]
uri = "{lake}"
[epoch]
max_delay = "10ms"
[maintenance]
compact = "off"
retention = "off"
[http]
listen = "off"
[sources.shop]
kind = "wal"
dsn = "postgresql://shop/x"
tables = ["public.*"]
"""
KINDS = ("delta", "memory")
OLD, NEW = "slot 'old', database shop", "slot 'new', database shop"


class FakeWal(FakeFactory):
    """The factory of kind `wal`, on a fake database."""

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        del config
        return super().create(source, FakeSettings(), memory_bytes=memory_bytes)


@pytest.fixture(params=KINDS)
def config(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """Return the config of a lake of each kind."""
    (tmp_path / "c.toml").write_text(CONFIG.format(lake=tmp_path / "lake"))
    found = load_config(tmp_path / "c.toml", SETTINGS, {})
    if request.param == "memory":
        one = MemoryLakeFactory()
        monkeypatch.setitem(LAKES, "memory", lambda _settings, _bytes: one)
        lake: LakeSettings = MemoryLakeSettings(uri="memory")
        return found.model_copy(update={"lake": lake})
    return found


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> FakeDatabase:
    """Return the database of source `shop`."""
    made = FakeDatabase([A])
    monkeypatch.setattr(factories, "FACTORIES", {"wal": FakeWal(made)})
    return made


def build(config: Config, lake: LakeFactory) -> tuple[SourceBuilder, DaemonStatus]:
    status = DaemonStatus("1", AT, lake=config.lake.uri)
    builder = SourceBuilder(lake, Metrics(), status, config.redactor)
    builder.source(config, "shop")
    return builder, status


async def test_a_source_runs_into_each_kind_of_lake(config: Config, base: FakeDatabase) -> None:
    lake, stop = factories.lake_of(config), asyncio.Event()
    with capture_logs():
        builder, status = build(config, lake)
        base.commit(put(A, 1, "before"))
        running = asyncio.create_task(builder.supervisor.run(stop))
        await until(lambda: is_live(status))
        base.commit(put(A, 1, "after", "u"), put(A, 2, "new"))
        await until(lambda: base.slot == base.current)
        await builder.supervisor.pause("shop")
        since = await lake.pause_mark("shop").since()
        stop.set()
        await running
    assert since is not None
    found = peek.last_changes(config, "shop", str(A.id), 10)["changes"]
    assert [(c["op"], c["columns"]["note"]) for c in found[:2]] == [("c", "new"), ("u", "after")]
    assert lake.tables("shop") == [A.id]
    epochs = peek.last_epochs(config, "shop", 1)["epochs"]
    assert [e["epoch"] for e in epochs] == [found[0]["epoch"]]
    assert lake.waiting("shop", 0.0) is None


def is_live(status: DaemonStatus) -> bool:
    table = status.sources["shop"].tables.get(str(A.id))
    return table is not None and table.state is TableState.LIVE


async def test_an_empty_lake_of_each_kind(config: Config) -> None:
    lake = factories.lake_of(config)
    assert {line.level for line in lake.check()} == {"ok"}
    assert await lake.check_writer("shop", "slot 'a'") is None
    assert lake.place("shop", A.id).startswith(lake.place("shop"))
    assert peek.last_epochs(config, "shop", 1)["epochs"] == []
    with pytest.raises(OperatorError, match="has no changes of source shop yet"):
        peek.last_changes(config, "shop", "public.a", 1)


async def start(lake: LakeFactory, claim: str) -> None:
    """Open the lake as one attempt of a daemon does."""
    sink = lake.sink("shop", claim)
    await sink.open()
    await sink.fence()
    await sink.adopt("server")
    await sink.close()


async def test_sinks_with_one_claim_are_one_writer(tmp_path: Path) -> None:
    settings = LakeSettings(uri=str(tmp_path))
    first, second = (LAKES["delta"](settings, 1 << 26) for _ in range(2))
    await start(first, OLD)
    await start(first, OLD)
    await start(second, NEW)
    with pytest.raises(OperatorError, match="another ingestd has taken over"):
        await start(first, OLD)
    line = await first.check_writer("shop", OLD)
    assert line is not None
    assert f"last written by {NEW}" in line.detail
    await first.sink("shop").open()  # a mere reader is not refused
    first.forget("shop")
    await start(first, OLD)


def test_local_tables_are_listed_by_their_folders(tmp_path: Path) -> None:
    for folder in ("shop/public/a/_delta_log", "shop/_ref/public/a", "shop/_epochs/_delta_log"):
        (tmp_path / folder).mkdir(parents=True)
    assert list(local_tables(str(tmp_path), "shop")) == [A.id]
