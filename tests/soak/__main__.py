"""`python -m tests.soak --minutes N --seed S`."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.databases import fresh_database
from tests.harness.lives import Lives, lives_config
from tests.harness.workload import create_schema
from tests.soak.run import Soak

MAX_DELAY = "60ms"
SETTINGS = {"fsync": "off", "full_page_writes": "off", "restart_after_crash": "on"}


def main(arguments: list[str]) -> int:
    """Soak, print the report; 1 if anything is wrong: then lake and logs are kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=0, help="at least so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with its report
    folder = Path(tempfile.mkdtemp(prefix="ingestd-soak-"))
    _say(f"seed {chosen.seed}, {chosen.minutes:g} minutes, in {folder}")
    server = PostgresServer(folder / "data", settings=SETTINGS)
    try:
        with server, fresh_database(server) as database:
            create_schema(database.dsn)
            lake = folder / "lake"
            config = lives_config(database, lake, max_delay=MAX_DELAY)
            daemon = Daemon(folder / "daemon", config)
            soak = Soak(Lives(database, lake, daemon, chosen.seed), server, chosen.seed, _say)
            try:
                soak.run(60 * chosen.minutes, kills=chosen.kills)
            except BaseException:
                _say(f"not survived; lake and logs are kept in {folder}")
                _print(soak.report.lines())
                raise
            finally:
                daemon.close()
    except (AssertionError, TimeoutError) as error:
        traceback.print_exception(error)
        return 1
    finally:
        server.close()
    _print(soak.report.lines())
    shutil.rmtree(folder)
    return 0


def _say(text: str) -> None:
    _print([f"{datetime.now(UTC):%H:%M:%S} {text}"])


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)  # noqa: T201 - the program's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
