"""After any history the lake equals the source, or the table is stopped with a reason.

I6, I8: after one catalog poll, whether the daemon ran meanwhile or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.servers import running_server
from tests.harness.standbys import needs, server_of
from tests.histories.life import KNOWS_DDL_LOG, SERVER_SETTINGS, Outcome, Setting, play
from tests.histories.named import MOVED, NAMED, NOT_VALID, PUBLISHED
from tests.histories.running import Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.histories.steps import History, Weather

DAEMON: tuple[Weather, ...] = ("up", "killed")
SEED = 31
"""Of the random histories that are the same each time."""
SIDE_BY_SIDE = 16
DDL_LOG = ["catalog"] + [
    pytest.param("event_trigger", marks=pytest.mark.thorough) for _ in range(int(KNOWS_DDL_LOG))
]
"""Of the source under test."""


@pytest.fixture(scope="module")
def server(postgres_bindir: Path) -> Iterator[PostgresServer]:
    with running_server(postgres_bindir, SERVER_SETTINGS) as made:
        yield made


@pytest.fixture(scope="module", params=DDL_LOG)
def ddl_log(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DAEMON)
def weather(request: pytest.FixtureRequest) -> Weather:
    found: Weather = request.param
    return found


@pytest.fixture(scope="module")
def named(server: PostgresServer, weather: Weather, ddl_log: str) -> dict[str, Outcome]:
    """All named histories, played in one life."""
    chosen = [h for h in NAMED if h.least <= server.major]
    outcomes = play(server, chosen, (weather,), Setting(ddl_log=ddl_log), 1)
    return {o.history.name: o for o in outcomes}


def judge(outcome: Outcome, weather: Weather) -> None:
    assert not outcome.refused, outcome.refused
    assert not outcome.faults, "\n".join([outcome.history.text((weather,)), *outcome.faults])
    assert outcome.verdicts or outcome.history.logged, "no table is left to compare"
    assert not outcome.is_stopped, outcome.verdicts


@pytest.mark.parametrize("name", [h.name for h in NAMED])
def test_i6_nothing_is_lost_without_a_word(
    named: dict[str, Outcome], weather: Weather, name: str
) -> None:
    judge(named[name], weather)


BY_SCHEMA = [pytest.param(history, id=history.name) for history in MOVED] + [
    pytest.param(history, id=history.name, marks=pytest.mark.thorough) for history in PUBLISHED
]


@pytest.mark.parametrize("history", BY_SCHEMA)
def test_i6_of_a_publication_of_schemas(
    server: PostgresServer, weather: Weather, ddl_log: str, history: History
) -> None:
    if history.least > server.major:
        pytest.skip("PostgreSQL 14 publishes no schemas")
    [outcome] = play(server, [history], (weather,), Setting(manage=False, ddl_log=ddl_log), 1)
    judge(outcome, weather)


@pytest.mark.thorough
def test_i6_an_index_over_nulls_identifies_nothing(weather: Weather, ddl_log: str) -> None:
    """It is refused, not used (18)."""
    needs(18)
    with server_of(18, SERVER_SETTINGS) as server:
        [outcome] = play(server, [NOT_VALID], (weather,), Setting(ddl_log=ddl_log), 1)
    assert not outcome.faults, "\n".join([NOT_VALID.text((weather,)), *outcome.faults])
    assert outcome.is_stopped, outcome.verdicts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_fixed", [True, False])
def test_i6_random_histories(
    server: PostgresServer, ddl_log: str, seed: int, *, is_fixed: bool
) -> None:
    """Some fixed ones, and some random ones.

    What differs is printed with the arguments of `python -m tests.histories` that make it small.
    """
    chosen = SEED if is_fixed else seed
    run = Run(server, chosen, ddl_log=ddl_log, side_by_side=SIDE_BY_SIDE, shrinks=False)
    run.life(0)
    judge_run(run)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_i6_more_random_histories(server: PostgresServer, ddl_log: str, seed: int) -> None:
    run = Run(server, seed, ddl_log=ddl_log, side_by_side=SIDE_BY_SIDE, shrinks=False)
    for number in range(1, 6):
        run.life(number)
    judge_run(run)


def judge_run(run: Run) -> None:
    print(run.counts())  # noqa: T201
    assert not run.different, "\n\n".join(run.told)
    assert run.stopped < run.played / 4, run.counts()
