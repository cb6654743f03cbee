"""Two daemons at once: one paused in the middle of a commit, one that took over meanwhile (I5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.faults.test_kill import Auditor, await_epoch_after
from tests.harness.command_line import run_command
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    raw_rows,
)
from tests.harness.config import polling_config, wal_config
from tests.harness.epoch_versions import assert_epoch_versions
from tests.harness.pausing import (
    LIMIT_S,
    assert_nobody_commits_after_a_fence,
    await_acted,
    end_sessions,
    let_pass,
    paused,
)
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

HELD_S = 4
"""How long a failpoint holds a daemon: until it is paused, or until the other has gone on."""
MIDDLE, HALF = "sink.raw_commit.before=delay:{}@9", "sink.epochs_commit.before=delay:{}@3"
"""Some tables' commits are done, others not; and all of them are, the row of `_epochs` is not."""
MOMENTS = (
    MIDDLE,
    HALF,
    "sink.raw_commit.after=delay:{}@9",
    "sink.commit_put.before=delay:{}@9",
    "sink.epochs_commit.after=delay:{}@3",
    "capture.confirm.before=delay:{}@3",
    "sink.parquet.before=delay:{}@9",
    "capture.decode.after=delay:{}@9",
)
FENCED = f"capture.stream_begin.before=delay:{HELD_S}"
"""The one that takes over has fenced the lake, and has committed nothing yet."""


@pytest.mark.timeout(600)
def test_one_writer_a_daemon_paused_during_takeover_stays_fenced(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    """I1 to I5: it wakes before the other's first commit, and after."""
    two_at_once(workload_database, make_daemon, lake, seed, (MIDDLE, HALF), pause_s=2)


@pytest.mark.thorough
def test_one_writer_of_two_that_poll_as_roles_that_see_no_lock(
    database: Database, make_daemon: MakeDaemon, lake: Path, stranger: str
) -> None:
    """I5: the daemon started last continues; the other one stops and names it."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"GRANT SELECT ON t TO {stranger}",
        "INSERT INTO t VALUES (1)",
    )
    config = polling_config(lake=lake, dsn=database.dsn)
    role = database.rows("SELECT current_user::text")[0][0]
    as_stranger = config.replace(f"user={role}", f"user={stranger}")
    assert as_stranger != config
    first, second = make_daemon(as_stranger, "first"), make_daemon(config, "second")
    first.start_ready()
    await_until(lambda: ids(lake) == [1], LIMIT_S, first.tail)
    checked = run_command(second.config_path, "check", columns=300)
    assert f"last written by polling as role '{stranger}'" in checked.stdout
    second.start_ready()
    [taken] = second.events("lake.taken_over")
    assert f"as role '{stranger}'" in taken["reason"]
    wanted = 1

    def is_stopped() -> bool:
        nonlocal wanted
        wanted += 1
        database.execute(f"INSERT INTO t VALUES ({wanted})")
        return any(e["state"] == "stopped" for e in first.events("source.failed"))

    await_until(is_stopped, LIMIT_S, first.tail)
    failed = first.events("source.failed")[-1]
    assert (
        f"another ingestd has taken over: its claim is polling as role '{role}'"
        in (failed["reason"])
    )
    await_until(lambda: sorted(ids(lake)) == list(range(1, wanted + 1)), LIMIT_S, second.tail)
    assert not second.events("source.failed"), second.tail()


def ids(lake: Path) -> list[int]:
    """Of all rows of `t`: none came twice."""
    rows = raw_rows(lake, TableId("public", "t"))
    return [row["id"] for row in rows if row["_cdc_op"] != "t"]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_one_writer_a_daemon_paused_for_a_minute_at_every_moment(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    two_at_once(workload_database, make_daemon, lake, seed, MOMENTS, pause_s=65)


def two_at_once(
    database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
    seed: int,
    moments: Sequence[str],
    *,
    pause_s: float,
) -> None:
    slot = f"ingestd_shop_{database.name}"  # the auditor's
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay="100ms",
        source_extra=f'slot = "{slot}"\npublication = "{slot}"',
    )
    workload = Workload(database.dsn, seed=seed, transactions=1_000_000, limit_s=2800, pause_s=0.01)
    with workload, Auditor(database, lake) as auditor:
        for number, moment in enumerate(moments):
            first = make_daemon(config, f"first_{number}", {VARIABLE: moment.format(HELD_S)})
            second = make_daemon(config, f"second_{number}", {VARIABLE: FENCED})
            first.start()
            await_acted(first, moment.partition("=")[0])
            with paused(first):
                assert end_sessions(database) >= 2  # the claim's and the stream's
                let_pass(pause_s)
                second.start()
                if number % 2:
                    second.await_ready(LIMIT_S)
                    await_epoch_after(len(epochs(lake)), lake, second)
                else:
                    await_acted(second, FENCED.partition("=")[0])
            assert_stands_by(first)
            second.await_ready(LIMIT_S)
            await_epoch_after(len(epochs(lake)), lake, second)
            assert first.sigterm() == 0
            assert second.sigterm() == 0
            assert not second.events("source.failed"), second.tail()
        last = make_daemon(config, "last")
        last.start_ready(LIMIT_S)
        workload.stop()
        assert_lake_equals_source(database, lake, slot=slot, limit_s=LIMIT_S)
        assert last.sigterm() == 0
    assert auditor.early == []
    assert_change_log_is_sound(database, lake)
    assert_epoch_versions(lake)
    assert assert_nobody_commits_after_a_fence(lake) == 2 * len(moments) + 1


def assert_stands_by(daemon: Daemon) -> None:
    """It reports that another daemon works on it, and waits."""

    def is_told() -> bool:
        answer = daemon.get("/readyz")
        return answer is not None and answer[0] == 503 and "another ingestd" in answer[1]

    await_until(is_told, LIMIT_S, lambda: f"it to stand by\n{daemon.tail()}")
    remedies = [str(event["remedy"]) for event in daemon.events("source.failed")]
    assert any("stop" in remedy for remedy in remedies), remedies
