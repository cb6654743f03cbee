"""docs/errors.md shows real messages: each fault is provoked, and the output compared.

`make errors-page` writes the page again. What differs from run to run (ports, paths, times, LSNs)
is shown as an example's.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.servers import running_server
from tests.harness.waiting import await_until

PAGE = Path(__file__).parent.parent.parent / "docs" / "errors.md"
WRITE = "INGESTD_WRITE_ERRORS_PAGE"
PASSWORD = "s3cr3t-Pa55"
LIMIT_S = 60.0
MOST_LINES = 3
HEAD = """\
# Errors, as they are seen

What is said when something is wrong: the cause first, then the remedy. This page is written by
`make errors-page`, which brings each fault about on a real server and copies what a person sees; a
test repeats it. All texts that there are: [Errors](reference/errors.md). What the daemon does about
faults while it runs: [Faults](faults.md). With `--debug` a command shows the traceback as well.
"""


class World:
    """A server that asks for passwords, a table, a folder to work in."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.dsn = server.dsn("shop")
        self._daemons = 0

    def config(self, **changes: Any) -> str:
        """TOML of source shop; `dsn`: changes of the connection string."""
        dsn = make_conninfo(self.dsn, **changes.pop("dsn", {}))
        return wal_config(lake="lake", dsn=dsn, **changes)

    def execute(self, *statements: str) -> None:
        with self.server.connect("shop") as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def ingestd(self, *arguments: str, config: str | None = None) -> str:
        """Run a command in the folder as a user would; return its output without the `ok` lines."""
        if config is not None:
            (self.folder / "ingestd.toml").write_text(config, encoding="utf-8")
        done = run_command(self.folder / "ingestd.toml", *arguments, columns=80)
        assert done.returncode in {1, 2, 75}, (arguments, done.stdout, done.stderr)
        words = " ".join(["ingestd", *arguments, "--config", "ingestd.toml"])
        lines = _wrong(done.stdout + done.stderr)
        return f"$ {words}\n" + "\n".join(lines) + f"\n$ echo $?\n{done.returncode}"

    @contextmanager
    def daemon(self, config: str) -> Iterator[Daemon]:
        """A daemon in a folder of its own, with a lake of its own where `config` does not say."""
        self._daemons += 1
        with Daemon(self.folder / f"daemon_{self._daemons}", config) as daemon:
            yield daemon

    def status(self, daemon: Daemon, states: str) -> str:
        """Wait until the source is in one of these states; return what `status` says is wrong."""
        await_until(lambda: _state(daemon) in states.split(), LIMIT_S, daemon.tail)
        done = run_command(daemon.config_path, "status")
        lines = (done.stdout + done.stderr).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("source shop"))
        return "$ ingestd status --config ingestd.toml\n...\n" + "\n".join(lines[first:])


def _state(daemon: Daemon) -> str:
    status = daemon.status()
    return "" if status is None else str(status["sources"]["shop"]["state"])


def _wrong(text: str) -> list[str]:
    """Leave out what `check` found to be right, and its count."""
    kept: list[str] = []
    is_kept = True
    for line in text.splitlines():
        if re.match(r"ok +|\d+ checks", line):
            is_kept = False
        elif not line.startswith("     "):
            is_kept = True
        if is_kept and line.strip():
            kept.append(line.rstrip())
    return kept


# --- what goes wrong -------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`is_so`: what was brought about, for the reader. `seen`: brings it about, gives the text."""

    title: str
    is_so: str
    seen: Callable[[World], str]


def not_there(world: World) -> str:
    (world.folder / "ingestd.toml").unlink(missing_ok=True)
    return world.ingestd("run")


def checked(replaced: str = "", by: str = "", **changes: Any) -> Callable[[World], str]:
    """Return what `check` says of a config."""

    def seen(world: World) -> str:
        config = world.config(**changes)
        assert not replaced or replaced in config
        return world.ingestd("check", config=config.replace(replaced, by))

    return seen


def prepared(*statements: str, undone: tuple[str, ...], **changes: Any) -> Callable[[World], str]:
    """Return what `check` says when these statements were run."""

    def seen(world: World) -> str:
        world.execute(*statements)
        try:
            return world.ingestd("check", config=world.config(**changes))
        finally:
            world.execute(*undone)

    return seen


def no_daemon(world: World) -> str:
    config = world.config(extra=f'[http]\nlisten = "127.0.0.1:{free_port()}"')
    return world.ingestd("snapshot", "shop", "public.orders", config=config)


def unknown_name(*arguments: str) -> Callable[[World], str]:
    """Return what is said to `snapshot` with names that the daemon does not know."""

    def seen(world: World) -> str:
        with world.daemon(world.config()) as daemon:
            daemon.await_ready(LIMIT_S)
            said = world.ingestd("snapshot", *arguments, config=daemon.config_path.read_text())
        _forget(world)
        return said

    return seen


def port_is_taken(world: World) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = world.config(extra=f'[http]\nlisten = "127.0.0.1:{port}"')
        return world.ingestd("run", config=config)


def taken_slots(world: World) -> str:
    taken = "SELECT pg_create_physical_replication_slot('taken_' || i) FROM generate_series(1, 4) i"
    gone = "SELECT pg_drop_replication_slot('taken_' || i) FROM generate_series(1, 4) i"
    world.execute(taken)
    try:
        with world.daemon(world.config()) as daemon:
            return world.status(daemon, "stopped backing_off")
    finally:
        world.execute(gone)
        _forget(world)


def taken_connections(world: World) -> str:
    world.execute("ALTER ROLE limited CONNECTION LIMIT 0")
    try:
        dsn = {"user": "limited", "password": PASSWORD}
        with world.daemon(world.config(dsn=dsn)) as daemon:
            return world.status(daemon, "stopped backing_off")
    finally:
        world.execute("ALTER ROLE limited CONNECTION LIMIT -1")


def server_stops(world: World) -> str:
    with world.daemon(world.config()) as daemon:
        daemon.await_ready(LIMIT_S)
        world.server.stop()
        try:
            await_until(
                lambda: "refused" in str((daemon.status() or {}).get("sources")),
                LIMIT_S,
                daemon.tail,
            )
            return world.status(daemon, "backing_off")
        finally:
            world.server.start()
            _forget(world)


def two_daemons(world: World) -> str:
    with world.daemon(world.config()) as first:
        first.await_ready(LIMIT_S)
        same = world.config().replace('"lake"', f'"{first.folder}/lake"')
        with world.daemon(same) as second:
            said = world.status(second, "backing_off")
    _forget(world)
    return said


def lost_slot(world: World) -> str:
    config = world.config(source_extra='slot_lost = "stop"')
    with world.daemon(config) as daemon:
        daemon.await_ready(LIMIT_S)
        assert daemon.sigterm() == 0
        world.execute("SELECT pg_drop_replication_slot('ingestd_shop')")
        daemon.start()
        said = world.status(daemon, "stopped")
    _forget(world)
    return said


def no_longer_whole(world: World) -> str:
    """A table whose right to be read is taken away while the daemon runs."""
    with world.daemon(world.config()) as daemon:
        daemon.await_ready(LIMIT_S)
        world.execute(
            "CREATE TABLE visits (page text)",
            "INSERT INTO visits VALUES ('home')",
        )
        await_until(
            lambda: any(t["state"] == "stopped" for t in _tables(daemon)), LIMIT_S, daemon.tail
        )
        said = world.status(daemon, "streaming")
    world.execute("DROP TABLE visits")
    _forget(world)
    return said


def _tables(daemon: Daemon) -> list[dict[str, Any]]:
    status = daemon.status()
    return [] if status is None else list(status["sources"]["shop"]["tables"])


def lake_is_no_folder(world: World) -> str:
    (world.folder / "rows").write_text("a file\n", encoding="utf-8")
    return world.ingestd("check", config=world.config().replace('"lake"', '"rows"'))


def wal_level(world: World) -> str:
    world.server.stop()
    world.server.settings["wal_level"] = "replica"
    world.server.start()
    try:
        return world.ingestd("check", config=world.config())
    finally:
        world.server.stop()
        world.server.settings["wal_level"] = "logical"
        world.server.start()


def _forget(world: World) -> None:
    """Drop slot and publication."""
    world.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active",
        "DROP PUBLICATION IF EXISTS ingestd_shop",
    )
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"

    def are_gone() -> bool:
        with world.server.connect("shop") as connection:
            connection.execute(drop)
            return not connection.execute("SELECT FROM pg_replication_slots").fetchall()

    await_until(are_gone, LIMIT_S, "the slots to be dropped")


MANAGED = {"source_extra": "manage = false"}
"""Source's lines: slot and publication are made by others."""

CHAPTERS: dict[str, tuple[Fault, ...]] = {
    "The config (exit code 2)": (
        Fault("No file", "There is no `ingestd.toml` here.", not_there),
        Fault("Not TOML", "A bracket is missing in line 4.", checked("[epoch]", "[epoch")),
        Fault("An unknown key", "`max_dellay`.", checked("max_delay", "max_dellay")),
        Fault("A value without a unit", '`max_delay = "soon"`.', checked('"200ms"', '"soon"')),
        Fault(
            "A missing secret",
            "`dsn` names an environment variable that is not set.",
            checked('dsn = "', 'dsn = "env:SHOP_DSN"  # "'),
        ),
        Fault("A table without a schema", '`tables = ["orders"]`.', checked("public.*", "orders")),
    ),
    "Commands": (
        Fault("No daemon runs", "`snapshot` asks the running daemon.", no_daemon),
        Fault("An unknown source", "`shops`.", unknown_name("shops", "public.orders")),
        Fault("An unknown table", "`public.order`.", unknown_name("shop", "public.order")),
        Fault("The port is taken", "Another program listens there.", port_is_taken),
    ),
    "Connecting": (
        Fault("Nobody listens", "Another port.", checked(dsn={"port": "1"})),
        Fault("No such host", "A mistyped host.", checked(dsn={"host": "host.invalid"})),
        Fault("A wrong password", "", checked(dsn={"password": "wrong"})),
        Fault("No such database", "", checked(dsn={"dbname": "shops"})),
        Fault("No such role", "", checked(dsn={"user": "nobody"})),
        Fault(
            "Too many connections",
            "The role's limit is reached; the daemon retries automatically.",
            taken_connections,
        ),
        Fault(
            "The server goes away",
            "It is stopped while the daemon runs. The daemon continues when the server is back.",
            server_stops,
        ),
    ),
    "Rights and settings of the source": (
        Fault("wal_level", "It is `replica`, as a new server has it.", wal_level),
        Fault(
            "A role without REPLICATION",
            "It also lacks the privilege to create a publication.",
            checked(dsn={"user": "limited", "password": PASSWORD}),
        ),
        Fault("manage = false", "Neither publication nor slot are there.", checked(**MANAGED)),
        Fault("All replication slots are taken", "max_replication_slots = 4.", taken_slots),
        Fault(
            "A table without a key",
            "Publishing it would make its own UPDATE and DELETE fail.",
            prepared("CREATE TABLE visits (page text)", undone=("DROP TABLE visits",)),
        ),
        Fault(
            "A table without SELECT",
            "Checked as a role with all other privileges.",
            prepared(
                "CREATE TABLE salaries (id int PRIMARY KEY)",
                "ALTER ROLE limited REPLICATION",
                "GRANT CREATE ON DATABASE shop TO limited",
                undone=("DROP TABLE salaries", "ALTER ROLE limited NOREPLICATION"),
                dsn={"user": "limited", "password": PASSWORD},
            ),
        ),
    ),
    "While it runs": (
        Fault("Two daemons", "A second one on the same source.", two_daemons),
        Fault(
            "The slot is missing",
            'It was dropped, with `slot_lost = "stop"`. Otherwise all tables are re-snapshotted.',
            lost_slot,
        ),
        Fault(
            "A new table without a key",
            "The other tables continue.",
            no_longer_whole,
        ),
        Fault("The lake is not a folder", "`uri` names a file.", lake_is_no_folder),
    ),
}


@pytest.fixture
def world(postgres_bindir: Path, tmp_path: Path) -> Iterator[World]:
    settings = {"fsync": "off", "max_replication_slots": "4"}
    with running_server(postgres_bindir, settings, password=PASSWORD) as server:
        with server.connect() as connection:
            connection.execute("CREATE DATABASE shop")
        world = World(server, tmp_path)
        world.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, note text)",
            f"CREATE ROLE limited LOGIN PASSWORD '{PASSWORD}'",
        )
        yield world


def _as_an_example(world: World, text: str) -> str:
    """Replace what differs from run to run."""
    for found, shown in (
        (re.escape(str(world.folder)) + r"(/daemon_\d+)?", "/srv/ingestd"),
        (rf"\b{world.server.port}\b", "5432"),
        (r"127\.0\.0\.1:\d+", "127.0.0.1:8080"),
        (r"\bpid \d+", "pid 4711"),
        (r"\b[0-9A-F]+/[0-9A-F]{3,8}\b", "0/1A2B3C8"),
        (r"\[Errno -\d\] [A-Za-z ]+", "[Errno -2] Name or service not known "),  # the resolver's
        (r"\b\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)?", "2026-11-22T12:00:00Z"),
    ):
        text = re.sub(found, shown, text)
    return text


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chapters",
    [
        pytest.param(("The config (exit code 2)",), id="some"),
        pytest.param(tuple(CHAPTERS), id="all", marks=pytest.mark.thorough),
    ],
)
def test_what_is_said_is_what_the_page_shows(world: World, chapters: tuple[str, ...]) -> None:
    found = {chapter: chapter_of(world, chapter) for chapter in chapters}
    if chapters == tuple(CHAPTERS):
        page = "".join([HEAD, *found.values()])
        if os.environ.get(WRITE):
            PAGE.write_text(page, encoding="utf-8")
        assert page == PAGE.read_text(encoding="utf-8"), "write it again: make errors-page"
    shown = PAGE.read_text(encoding="utf-8")
    for chapter, text in found.items():
        assert text in shown, f"{chapter} differs; write it again: make errors-page"


def chapter_of(world: World, chapter: str) -> str:
    """Bring its faults about; return what is said, as the page has it."""
    parts = [f"\n## {chapter}\n"]
    for fault in CHAPTERS[chapter]:
        seen = _as_an_example(world, fault.seen(world))
        assert "Traceback" not in seen, fault.title
        assert PASSWORD not in seen, fault.title
        # Without the commands, and the exit code that is printed.
        said = [n for n in seen.splitlines() if not n.startswith("$") and not n.isdigit()]
        for one in re.split(r"^(?=fail |ingestd:|source )", "\n".join(said), flags=re.MULTILINE):
            assert len(one.splitlines()) <= MOST_LINES, fault.title
        about = f"{fault.is_so}\n\n" if fault.is_so else ""
        parts.append(f"\n### {fault.title}\n\n{about}```text\n{seen}\n```\n")
    return "".join(parts)
