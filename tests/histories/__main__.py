"""`python -m tests.histories --count N --server 15 --seed S --ddl-log catalog`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from tests.harness.servers import running_server
from tests.harness.standbys import bindir_of
from tests.histories.life import KNOWS_DDL_LOG, SERVER_SETTINGS
from tests.histories.running import Run
from tests.histories.worlds import WORLDS


def main(arguments: list[str]) -> int:
    """Play them, print counts and what differed; 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--server", type=int, default=15, help="major version")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument(
        "--ddl-log", default="catalog", choices=["catalog", "event_trigger"][: 1 + KNOWS_DDL_LOG]
    )
    parser.add_argument("--side-by-side", type=int, default=40, help="histories in a life")
    parser.add_argument("--lives", type=int, help="only so many, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first life to play")
    names = [w.name for w in WORLDS]
    parser.add_argument("--worlds", nargs="+", choices=names, default=names, metavar="WORLD")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--found", type=Path, help="a file to which what differs is added")
    chosen = parser.parse_args(arguments)
    _say(f"seed {chosen.seed}, PostgreSQL {chosen.server}, ddl_log {chosen.ddl_log}")
    began = time.monotonic()
    with running_server(bindir_of(chosen.server), SERVER_SETTINGS) as server:
        run = Run(
            server,
            chosen.seed,
            ddl_log=chosen.ddl_log,
            side_by_side=chosen.side_by_side,
            shrinks=chosen.shrink,
            found=chosen.found,
            worlds=[w for w in WORLDS if w.name in chosen.worlds],
        )
        lives = chosen.lives or -(-chosen.count // chosen.side_by_side)
        for number in range(chosen.first, chosen.first + lives):
            run.life(number)
            _say(f"{time.monotonic() - began:6.0f} s, life {number}: {run.counts()}")
    _say("\n\n".join(run.told))
    return int(bool(run.different))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the program's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
