"""SIGHUP: the config is reloaded, and only what differs is restarted; on a real server."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import module_environment
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.harness.workload import Workload
from tests.integration.test_pause import done

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90
T, U = TableId("public", "t"), TableId("public", "u")


def section(database: Database, name: str, tables: str, **more: str) -> str:
    """TOML of one source more."""
    lines = [
        f"[sources.{name}]",
        'kind = "wal"',
        f'dsn = "{database.dsn}"',
        f"tables = [{tables}]",
        f'slot = "{database.name}_{name}"',
        f'publication = "{database.name}_{name}"',
        *(f"{key} = {value}" for key, value in more.items()),
    ]
    return "\n".join(lines)


def config(database: Database, lake: Path, *, max_delay: str = "100ms", **sources: str) -> str:
    """TOML of sources by name, with their `tables`."""
    sections = [section(database, name, tables) for name, tables in sources.items()]
    rim = f'[lake]\nuri = "{lake}"\n[epoch]\nmax_delay = "{max_delay}"\n'
    return rim + "\n".join(sections)


def reload(daemon: Daemon, text: str | None = None, event: str = "config.reloaded") -> Any:
    """Have it read this config; return what it logs of that."""
    if text is not None:
        daemon.write_config(text)
    before = len(daemon.events(event))
    daemon.sighup()
    await_until(lambda: len(daemon.events(event)) > before, LIMIT_S, daemon.tail)
    return daemon.events(event)[-1]


def states(daemon: Daemon) -> dict[str, str]:
    status = daemon.status() or {"sources": {}}
    return {name: source["state"] for name, source in status["sources"].items()}


def await_states(daemon: Daemon, **wanted: str) -> None:
    await_until(lambda: states(daemon) == wanted, LIMIT_S, daemon.tail)


def began(daemon: Daemon, source: str) -> int:
    """How often a source's pipeline got as far as its tables."""
    return sum(e["source"] == source for e in daemon.events("source.discovered"))


@pytest.fixture
def tables(database: Database) -> Database:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t SELECT n FROM generate_series(1, 10) n",
        "INSERT INTO u SELECT n FROM generate_series(1, 10) n",
    )
    return database


def test_isolated_only_sources_that_differ_are_begun_again(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(config(tables, lake, shop='"public.t"', other='"public.u"'))
    daemon.start_ready(LIMIT_S)
    told = reload(daemon)
    assert (told["added"], told["removed"], told["changed"]) == ([], [], [])

    wider = config(tables, lake, shop='"public.t", "public.u"', other='"public.u"')
    assert reload(daemon, wider)["changed"] == ["shop"]
    await_until(lambda: is_live(lake, "shop", "public.u"), LIMIT_S, daemon.tail)
    daemon.await_ready(LIMIT_S)
    assert (began(daemon, "shop"), began(daemon, "other")) == (2, 1)

    told = reload(daemon, config(tables, lake, shop='"public.t", "public.u"'))
    assert (told["removed"], told["changed"]) == (["other"], [])
    await_states(daemon, shop="streaming")
    [removed] = daemon.events("source.removed")
    assert removed["source"] == "other"
    _, metrics = daemon.get("/metrics") or (0, "")
    assert 'source="other"' not in metrics
    tables.execute("INSERT INTO t VALUES (11)", "INSERT INTO u VALUES (11)")

    told = reload(daemon, wider)
    assert (told["added"], told["changed"]) == (["other"], []), "the memory is again as it was"
    await_states(daemon, shop="streaming", other="streaming")
    assert_lake_equals_source(tables, lake, "shop", slot=f"{tables.name}_shop")
    assert_lake_equals_source(tables, lake, "other", [U], slot=f"{tables.name}_other")
    # Three share what two had: those begin again, with less memory (I9).
    third = config(tables, lake, shop='"public.t", "public.u"', other='"public.u"', more='"*.t"')
    told = reload(daemon, third)
    assert (told["added"], sorted(told["changed"])) == (["more"], ["other", "shop"])
    await_states(daemon, shop="streaming", other="streaming", more="streaming")
    assert daemon.sigterm() == 0


def is_live(lake: Path, source: str, table: str) -> bool:
    return any(row["table"] == table and row["state"] == "live" for row in registry(lake, source))


def test_an_invalid_config_changes_nothing_and_is_logged(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    text = config(tables, lake, shop='"public.t"')
    daemon = make_daemon(text)
    daemon.start_ready(LIMIT_S)
    refused = reload(daemon, text.replace("max_delay", "max_dealy"), "config.refused")
    assert len(refused["problems"]) == 1
    assert refused["problems"][0].startswith("epoch.max_dealy: ")
    assert "max_delay" in refused["problems"][0]
    assert reload(daemon, "[lake", "config.refused")["problems"]

    fixed = text.replace("[epoch]", '[limits]\nmemory = "256MB"\n[epoch]')
    fixed = fixed.replace(str(lake), f"{lake}2")
    reload(daemon, fixed)
    assert began(daemon, "shop") == 1
    [told] = daemon.events("config.needs_restart")
    assert told["keys"] == ["lake.uri", "limits.memory"]
    tables.execute("INSERT INTO t VALUES (11)")
    assert_lake_equals_source(tables, lake, tables=[T], slot=f"{tables.name}_shop")


def test_the_log_is_as_the_new_config_says(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    text = config(tables, lake, shop='"public.t"')
    daemon = make_daemon(text)
    daemon.start_ready(LIMIT_S)
    daemon.write_config(config(tables, lake, shop='"public.t"', other='"public.u"'))
    quiet = daemon.config_path.read_text().replace("[log]", '[log]\nlevel = "error"')
    daemon.config_path.write_text(quiet)
    daemon.sighup()
    await_states(daemon, shop="streaming", other="streaming")
    assert began(daemon, "other") == 0, "what is no error is not logged any more"


def test_a_pause_that_was_set_in_the_lake_is_noticed(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(config(tables, lake, shop='"public.t"'))
    daemon.start_ready(LIMIT_S)
    (lake / "shop" / "_paused").write_text("by hand\n")
    reload(daemon)
    await_states(daemon, shop="paused")
    (lake / "shop" / "_paused").unlink()
    reload(daemon)
    await_states(daemon, shop="streaming")


def test_a_terminal_that_is_closed_ends_the_daemon(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """That sends SIGHUP too, and the daemon was not left running on purpose."""
    daemon = make_daemon(config(tables, lake, shop='"public.t"'))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ingestd", "run", "-c", daemon.config_path.name],
        cwd=daemon.folder,
        env=module_environment(),
        preexec_fn=lambda: os.login_tty(slave),  # noqa: PLW1509 - it takes no lock
    )
    try:
        os.close(slave)
        await_until(lambda: states(daemon) == {"shop": "streaming"}, LIMIT_S)
        os.close(master)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


def caught(pid: int) -> set[int]:
    """Signals that the process has handlers for."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return {number for number in range(1, 32) if mask >> number - 1 & 1}


def test_a_hangup_while_the_daemon_starts_does_not_end_it(
    tables: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """Most of the start is imports; `systemctl reload` may arrive meanwhile."""
    daemon = make_daemon(config(tables, lake, shop='"public.t"'))
    daemon.start()
    await_until(lambda: signal.SIGTERM in caught(daemon.pid), LIMIT_S, poll_s=0.001)
    assert signal.SIGHUP in caught(daemon.pid)
    while not daemon.events("daemon.started"):
        daemon.sighup()
        time.sleep(0.01)
    daemon.await_ready(LIMIT_S)


def await_more_epochs(daemon: Daemon, lake: Path) -> None:
    was = len(epochs(lake))
    await_until(lambda: len(epochs(lake)) > was + 2, LIMIT_S, daemon.tail)


def await_more_written(writing: Workload) -> None:
    was = writing.committed
    await_until(lambda: writing.committed > was + 50, LIMIT_S)


@pytest.mark.thorough
@pytest.mark.parametrize("turns", [2, pytest.param(12, marks=pytest.mark.long)])
def test_exactly_once_under_reloads_and_pauses(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int, turns: int
) -> None:
    def text(max_delay: str) -> str:
        names = f'slot = "{workload_database.name}"\npublication = "{workload_database.name}"\n'
        return wal_config(
            lake=lake, dsn=workload_database.dsn, max_delay=max_delay, source_extra=names
        )

    daemon = make_daemon(text("20ms"))
    daemon.start()
    workload = Workload(
        workload_database.dsn, seed=seed, transactions=10**6, limit_s=900, pause_s=0.005
    )
    with workload as writing:
        for turn in range(turns):
            await_more_epochs(daemon, lake)
            assert reload(daemon, text(f"{21 + turn}ms"))["changed"] == ["shop"]
            done(daemon, "pause", "shop")
            was = len(epochs(lake))
            await_more_written(writing)
            assert len(epochs(lake)) == was, "a paused source delivers nothing"
            if turn % 2:
                daemon.sigkill()
                daemon.start()
            await_states(daemon, shop="paused")
            done(daemon, "resume", "shop")
        assert writing.committed
    with workload_database.connect() as connection:
        await_caught_up(connection, workload_database.name, LIMIT_S)
    assert_lake_equals_source(workload_database, lake, slot=workload_database.name)
    assert_change_log_is_sound(workload_database, lake)
