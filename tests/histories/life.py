"""One daemon on one database, in which many histories are played side by side."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingestd.http.client import request_snapshot
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import TableId
from ingestd.postgres.settings import WalSettings
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until
from tests.histories.oracle import CAPTURED, SOURCE, Verdict, compare, inserted, present
from tests.histories.sessions import Sessions
from tests.histories.steps import DOWN, History, SessionStatement, Weather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

LIMIT_S = 90.0
PATIENCE_S = 4.0
"""How long a table that differs may go on to, when nothing is being read: what is read again for
this check has been begun by then."""
STOPS_COUNT_S = 1.0
"""A table that is stopped at the check may be read by it."""
CHECK_LIMIT_S = 4.0
"""Of a check between two phases: it may have to wait for a session that holds a table."""
SQL_OF_DDL_LOG = Path(__file__).parents[2] / "deploy" / "ddl_log.sql"
KNOWS_DDL_LOG = "ddl_log" in WalSettings.model_fields
SERVER_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "400",
    "max_prepared_transactions": "100",
    "max_locks_per_transaction": "512",
    "autovacuum": "off",
}
_HARMLESS_S = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """How the daemon is set up. `manage`: the publication is the daemon's own, with its tables in
    it one by one; else it is ours, FOR TABLES IN SCHEMA. `ddl_log` and `before`: the config's keys.
    """

    manage: bool = True
    ddl_log: str = "catalog"
    before: str = "key"


@dataclass
class Outcome:
    """What became of a history.

    `verdicts`: at the end, and at checks before it where a table had lost something.
    """

    history: History
    verdicts: list[Verdict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    steps: int = 0
    logged: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """Report silent losses, and deviations from what the history expects."""
        found = [
            f"{v.table} is {v.state}: {'; '.join(v.wrong)}" for v in self.verdicts if v.is_lost
        ]
        found += [
            f"{v.table} is {v.state} at the end"
            for v in self.verdicts
            if not v.is_lost and v.state not in {"live", "stopped"}
        ]
        if self.history.is_read_again and all(v.markers < 2 for v in self.verdicts):
            found.append("no table was read again")
        if self.history.logged != self.logged:
            found.append(f"the log has {self.logged} of {self.history.logged}")
        return found

    @property
    def is_stopped(self) -> bool:
        """Whether every table of it is stopped, so that nothing was shown."""
        return bool(self.verdicts) and all(v.state == "stopped" for v in self.verdicts)


class Life:
    """See above. `weather`: one for each phase of the histories."""

    def __init__(self, database: Database, folder: Path, setting: Setting, seed: int) -> None:
        self._database = database
        self._setting = setting
        self._rng = random.Random(seed)
        self.lake = folder / "lake"
        name = database.name
        extra = f'slot = "{name}"\npublication = "{name}"\ndiscover_interval = "1h"\n'
        extra += f'before = "{setting.before}"\n'
        if not setting.manage:
            extra += "manage = false\n"
        if KNOWS_DDL_LOG:
            extra += f'ddl_log = "{setting.ddl_log}"\n'
        tables = [f"{schema}.*" for schema in CAPTURED]
        self.daemon = Daemon(
            folder,
            wal_config(
                lake=self.lake,
                dsn=database.dsn,
                tables=tables,
                max_delay="300ms",
                source_extra=extra,
            ),
        )

    def prepare(self, histories: Sequence[History]) -> None:
        """Make the tables and start the daemon, which reads them."""
        self._database.execute(
            "CREATE SCHEMA other",
            "CREATE SCHEMA elsewhere",
            "CREATE TABLE tick (id int PRIMARY KEY)",
        )
        if self._setting.ddl_log == "event_trigger" and SQL_OF_DDL_LOG.exists():
            self._database.execute(SQL_OF_DDL_LOG.read_text(encoding="utf-8"))
        with self._database.connect() as connection:
            for number, history in enumerate(histories):
                for statement in history.create:
                    connection.execute(statement.replace("{h}", prefix_of(number)).encode())
        if not self._setting.manage:
            name = self._database.name
            self._database.execute(
                f'CREATE PUBLICATION "{name}" FOR TABLES IN SCHEMA {", ".join(CAPTURED)}'
                " WITH (publish_via_partition_root = true)",
                f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
            )
        self._start()
        await_until(self._all_read, LIMIT_S, lambda: f"all tables live\n{self.daemon.tail()}")

    def play(self, histories: Sequence[History], weather: Sequence[Weather]) -> list[Outcome]:
        """Play them, phase by phase, their steps in a random order among each other."""
        outcomes = [Outcome(history) for history in histories]
        sessions = [Sessions(self._database, prefix_of(n)) for n in range(len(histories))]
        try:
            for phase, found in enumerate(weather):
                self._begin(found)
                for number, step in self._merged([list(h.phases[phase]) for h in histories]):
                    sessions[number].execute(step)
                    outcomes[number].steps += 1
                if phase + 1 < len(weather):  # else when no transaction is open
                    self._end(found)
        finally:
            for session in sessions:
                session.close()
        if not self.daemon.is_running:
            self._start()
        self._settle(outcomes)
        for number, (outcome, session) in enumerate(zip(outcomes, sessions, strict=True)):
            outcome.refused = session.refused
            if outcome.history.logged:
                table = TableId("public", f"{prefix_of(number)}_t")
                outcome.logged = inserted(self.lake, table)
        return outcomes

    def _begin(self, weather: Weather) -> None:
        if weather == "killed":
            self.daemon.sigkill()
        elif weather == "stopped":
            self.daemon.sigterm()

    def _end(self, weather: Weather) -> None:
        if weather in DOWN:
            self._start()
        elif weather == "checked":
            self._check(limit_s=CHECK_LIMIT_S)

    def _merged(
        self, steps: list[list[SessionStatement]]
    ) -> Iterator[tuple[int, SessionStatement]]:
        """Return the steps of all, each history's in its order, with its place."""
        turns = [n for n, own in enumerate(steps) for _ in own]
        self._rng.shuffle(turns)
        for number in turns:
            yield number, steps[number].pop(0)

    # --- the daemon ----------------------------------------------------------------------------

    def _start(self) -> None:
        """Start it and wait until it streams; tables may be stopped."""
        self.daemon.start()
        await_until(self._is_streaming, LIMIT_S, lambda: f"it to stream\n{self.daemon.tail()}")

    def _is_streaming(self) -> bool:
        source = self._source()
        return source is not None and source["state"] in {"streaming", "snapshotting"}

    def _all_read(self) -> bool:
        return all(t["state"] in {"live", "stopped"} for t in self._states().values())

    def _source(self) -> dict[str, Any] | None:
        if not self.daemon.is_running:
            msg = f"the daemon ended\n{self.daemon.tail()}"
            raise AssertionError(msg)
        status = self.daemon.status()
        return None if status is None else status["sources"][SOURCE]

    def _states(self) -> dict[str, dict[str, Any]]:
        source = self._source()
        return {} if source is None else {t["table"]: t for t in source["tables"]}

    def _check(self, *, limit_s: float) -> bool:
        """Make it poll the catalog once; return whether it has done so within the limit.

        A snapshot request makes it poll first. The requested table belongs to no history.
        """
        before = self._states().get("public.tick", {}).get("snapshot_lsn")
        end_s = time.monotonic() + limit_s
        while True:
            try:
                request_snapshot(self.daemon.listen, SOURCE, ["public.tick"])
                break
            except (TransientError, OperatorError):
                if time.monotonic() > end_s:
                    return False
                time.sleep(_HARMLESS_S)

        def is_read() -> bool:
            now = self._states().get("public.tick")
            return (
                now is not None
                and now["state"] == "live"
                and not now["snapshot_requested"]
                and now["snapshot"] is None
                and now["snapshot_lsn"] != before
            )

        with contextlib.suppress(TimeoutError):
            await_until(is_read, max(0.1, end_s - time.monotonic()), "a check")
            return True
        return False

    # --- the end -------------------------------------------------------------------------------

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Have it catch up and check once, then compare."""
        with self._database.connect() as connection:
            connection.execute("INSERT INTO tick SELECT count(*) FROM tick")  # confirmed at once
            await_caught_up(connection, self._database.name, LIMIT_S)
        assert self._check(limit_s=LIMIT_S), f"no check\n{self.daemon.tail()}"
        left: dict[TableId, int] = {
            table: number
            for number in range(len(outcomes))
            for table in present(self._database, prefix_of(number))
        }
        end_s = time.monotonic() + LIMIT_S
        patience_s = stops_count_s = 0.0
        while left:
            began_s = time.monotonic()
            states = self._states()
            busy = {name for name, t in states.items() if t["state"] == "snapshotting"}
            if busy or not patience_s:
                patience_s, stops_count_s = began_s + PATIENCE_S, began_s + STOPS_COUNT_S
            is_over = began_s > (min(end_s, patience_s) if not busy else end_s)
            chosen = [t for t in left if is_over or str(t) not in busy]
            for table, verdict in zip(
                chosen, compare(self._database, self.lake, chosen, states), strict=True
            ):
                is_done = not verdict.wrong and verdict.state == "live"
                is_stopped = verdict.state == "stopped" and began_s > stops_count_s and not busy
                if is_done or is_stopped or is_over:
                    outcomes[left.pop(table)].verdicts.append(verdict)
            if left:
                time.sleep(0.2)


def prefix_of(number: int) -> str:
    """Name what the tables of a history begin with in a life."""
    return f"h{number:03d}"


def play(  # noqa: PLR0917 - all that a life is
    server: PostgresServer,
    histories: Sequence[History],
    weather: Sequence[Weather],
    setting: Setting,
    seed: int,
    keep: Path | None = None,
) -> list[Outcome]:
    """Play histories in a life of their own. `keep`: where lake and log stay."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(fresh_database(server))
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="histories-")))
        life = Life(database, folder, setting, seed)
        stack.callback(life.daemon.close)
        life.prepare(histories)
        return life.play(histories, weather)
