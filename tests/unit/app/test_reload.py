"""What a reload does, by what differs between two configs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ingestd.app.factories import share_bytes
from ingestd.app.reload import ConfigReload, changes
from ingestd.config import Config, load_config
from ingestd.model.errors import ConfigError
from ingestd.pipeline.supervisor import Supervisor
from ingestd.postgres.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Load = Callable[..., Config]

SHOP = 'kind = "wal"\ndsn = "postgresql://shop/x"\ntables = ["public.*"]\n'
LEGACY = 'kind = "polling"\ndsn = "postgresql://legacy/x"\ntables = ["public.*"]\n'
TWO = {"shop": SHOP, "legacy": LEGACY}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return the config of these sources and sections."""

    def read(sources: dict[str, str], more: str = "", uri: str = "./lake") -> Config:
        parts = [f'[lake]\nuri = "{uri}"', more]
        parts += [f"[sources.{name}]\n{text}" for name, text in sources.items()]
        path = tmp_path / "ingestd.toml"
        path.write_text("\n".join(parts))
        return load_config(path, SETTINGS, {})

    return read


def shares(config: Config) -> dict[str, int]:
    return dict.fromkeys(config.sources, share_bytes(config))


def test_an_equal_config_touches_nothing(load: Load) -> None:
    was = load(TWO)
    found = changes(was, load(TWO), shares(was))
    assert (found.added, found.removed, found.changed, found.fixed) == ((), (), (), ())


@pytest.mark.parametrize(
    ("sources", "added", "removed", "changed"),
    [
        (TWO | {"shop": SHOP + 'snapshot = "never"\n'}, (), (), ("shop",)),
        (TWO | {"legacy": LEGACY + 'interval = "1s"\n'}, (), (), ("legacy",)),
        (
            TWO | {"shop": SHOP + '[sources.shop.table."public.t"]\nrefresh = "1m"\n'},
            (),
            (),
            ("shop",),
        ),
        ({"shop": SHOP}, (), ("legacy",), ()),
        ({"shop": LEGACY, "legacy": LEGACY}, (), (), ("shop",)),
    ],
)
def test_only_sources_that_differ_are_begun_again(
    load: Load,
    sources: dict[str, str],
    added: tuple[str, ...],
    removed: tuple[str, ...],
    changed: tuple[str, ...],
) -> None:
    was = load(TWO)
    found = changes(was, load(sources), shares(was))
    assert (found.added, found.removed, found.changed) == (added, removed, changed)


@pytest.mark.parametrize("more", ['[epoch]\nmax_delay = "1s"', '[maintenance]\ncompact = "off"'])
def test_what_all_sources_go_by_has_all_begun_again(load: Load, more: str) -> None:
    was = load(TWO)
    assert changes(was, load(TWO, more), shares(was)).changed == ("shop", "legacy")


def test_bounded_one_source_more_leaves_the_others_less_memory(load: Load) -> None:
    was = load({"shop": SHOP})
    found = changes(was, load(TWO), shares(was))
    assert (found.added, found.changed) == (("legacy",), ("shop",))
    # It runs with the smaller share already, as after another's removal.
    assert changes(was, load(TWO), {"shop": share_bytes(found.config)}).changed == ()


def test_what_can_not_change_is_named_and_the_old_holds(load: Load) -> None:
    was = load(TWO)
    wanted = load(
        TWO, '[limits]\nmemory = "128MB"\n[http]\nlisten = "off"\n[log]\nlevel = "debug"', "./else"
    )
    found = changes(was, wanted, shares(was))
    assert found.fixed == ("lake.uri", "limits.memory", "http.listen")
    assert found.changed == ()
    assert (found.config.lake, found.config.limits, found.config.http) == (
        was.lake,
        was.limits,
        was.http,
    )
    assert found.config.log.level == "debug"


class Begun:
    """Notes what a reload has done."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def log(self, config: Config) -> None:
        del config

    def source(self, config: Config, name: str) -> None:
        del config
        self.begun.append(name)

    def drop_source(self, name: str) -> None:
        self.begun.append(f"not {name}")


async def test_a_refused_file_changes_nothing(load: Load) -> None:
    was, begun, told = load(TWO), Begun(), []

    def refuse() -> Config:
        msg = "epoch.max_dealy: unknown key\nlake.uri: is empty"
        raise ConfigError(msg)

    reloading = ConfigReload(
        was, refuse, begun, Supervisor({}), lambda: told.append(1), lambda: told.append(2)
    )
    asked = asyncio.Event()
    asked.set()
    with capture_logs() as logged:
        running = asyncio.create_task(reloading.run(asked))
        async with asyncio.timeout(10):
            while len(told) < 2:  # noqa: ASYNC110 - a list is what reports it
                await asyncio.sleep(0.001)
        running.cancel()
    assert told == [1, 2], "the service manager hears that it is over"
    assert (reloading.config, begun.begun) == (was, [])
    [refused] = logged
    assert refused["event"] == "config.refused"
    assert refused["problems"] == ["epoch.max_dealy: unknown key", "lake.uri: is empty"]


async def test_a_fault_of_a_reload_is_logged_and_the_next_one_counts(load: Load) -> None:
    was, begun = load(TWO), Begun()
    told: list[int] = []

    def wanted() -> Config:
        if not told[1:]:
            raise ZeroDivisionError
        return was

    reloading = ConfigReload(
        was, wanted, begun, Supervisor({}), lambda: told.append(1), lambda: told.append(2)
    )
    asked = asyncio.Event()
    with capture_logs() as logged:
        running = asyncio.create_task(reloading.run(asked))
        async with asyncio.timeout(10):
            for count in (2, 4):
                asked.set()
                while len(told) < count:  # noqa: ASYNC110 - a list is what reports it
                    await asyncio.sleep(0.001)
        running.cancel()
    assert [e["event"] for e in logged] == ["config.failed", "config.reloaded"]


async def test_a_source_that_comes_begins_after_one_that_goes(load: Load) -> None:
    begun = Begun()
    supervisor = Supervisor({})
    gone: list[str] = []

    async def end(name: str) -> None:
        await asyncio.sleep(0)
        gone.append(name)
        begun.begun.append(f"end {name}")

    supervisor.stop_source = end  # type: ignore[method-assign]
    was = load({"shop": SHOP})
    wanted = load({"store": SHOP})
    reloading = ConfigReload(was, lambda: wanted, begun, supervisor, lambda: None, lambda: None)
    with capture_logs() as logged:
        await reloading.reload()
    assert begun.begun == ["end shop", "not shop", "store"]
    assert [e["event"] for e in logged] == ["config.reloaded", "source.removed"]
