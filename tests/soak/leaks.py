"""`make soak-leaks`: a steady load for long; does the daemon hold more and more?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.databases import fresh_database
from tests.harness.workload import create_schema
from tests.soak.samples import Limits, Sample, Trend
from tests.soak.steady import Steady, steady_config

SETTINGS = {"fsync": "off", "full_page_writes": "off"}


def main(arguments: list[str]) -> int:
    """Load, sample, print the report; 1 if something grew or differs: then all is kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.leaks", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--max-mb-per-hour", type=float, default=Limits().rss_mb_per_hour)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    chosen = parser.parse_args(arguments)
    limits = Limits(rss_mb_per_hour=chosen.max_mb_per_hour)
    folder = Path(tempfile.mkdtemp(prefix="ingestd-leaks-"))
    _say(f"seed {chosen.seed}, {chosen.minutes:g} minutes, in {folder}")
    try:
        samples = _soak(folder, 60 * chosen.minutes, chosen.every, chosen.seed)
    except (AssertionError, TimeoutError) as error:
        traceback.print_exception(error)
        return 1
    (folder / "samples.json").write_text(
        json.dumps([dataclasses.asdict(one) for one in samples]), encoding="ascii"
    )
    trend = Trend(samples)
    faults = trend.faults(limits)
    _print([*trend.lines(), *faults, "grows" if faults else "flat"])
    if not faults:
        shutil.rmtree(folder)
    return 1 if faults else 0


def _soak(folder: Path, seconds: float, every_s: float, seed: int) -> list[Sample]:
    server = PostgresServer(folder / "data", settings=SETTINGS)
    try:
        with server, fresh_database(server) as database:
            create_schema(database.dsn)
            lake = folder / "lake"
            daemon = Daemon(folder / "daemon", steady_config(database, lake))
            steady = Steady(database, lake, daemon, seed=seed, tell=_say)
            try:
                samples = steady.run(seconds, every_s)
            finally:
                daemon.close()
            _say(f"scraped {steady.scraped} times, {steady.changed} changes of tables")
            return samples
    finally:
        server.close()


def _say(text: str) -> None:
    _print([f"{datetime.now(UTC):%H:%M:%S} {text}"])


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)  # noqa: T201 - the program's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
