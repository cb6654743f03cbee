"""`python -m tests.spark_matrix [SPARK ...]`: tests of the Spark jobs on other versions of Spark.

`SPARK`: a minor version such as 3.5, a pair such as 3.5+3.2, or `all`; without any, 3.5 and the
newest. A minor version is the first of its pairs: 3.5 is 3.5+3.3. Each pair gets a virtual
environment below `.venv/spark`, with its own PySpark before the packages of this Python; wheels are
kept in `.venv/spark/wheels`. The tests with the mark `spark_matrix` run with the accelerator and
without it; with `--few`, those with `spark_few`. `--pytest`: for pytest, such as '-k name'.

Exit code 1: a test failed; 69: a pair can't be installed, or its Spark does not start.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

from ingestd.model.errors import OperatorError
from spark_jobs.accelerator.choice import VARIABLE
from spark_jobs.pairs import NEWEST, PAIRS, Pair, installed, pairs_of
from tests.matrix import NOTHING_FOUND, ROOT, Outcome, run_pytest, say

MARK = "spark_matrix"
FEW = "spark_few and not thorough"
WAYS = {"on": "not long", "off": "not long and not accelerator"}
"""The tests with the accelerator on and off."""
UNAVAILABLE = 69
"""Exit code (EX_UNAVAILABLE of sysexits.h)."""
_START = f"""
import sys
from ingestd.model.errors import OperatorError
from spark_jobs.session import local_session
try:
    local_session("ingestd").stop()
except OperatorError as error:
    sys.exit(print(error) or {UNAVAILABLE})
"""
"""Also downloads Delta's jars."""


def main(arguments: list[str]) -> int:
    """Run what is asked for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark_matrix", description=__doc__)
    parser.add_argument("pairs", nargs="*", metavar="SPARK", help="3.5 and the newest")
    parser.add_argument("--few", action="store_true", help="one or two tests of each job")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "spark")
    parser.add_argument("--pytest", default="", help="for pytest, such as '-k name'")
    chosen = parser.parse_args(arguments)
    try:
        pairs = [pair for name in chosen.pairs or ["3.5", NEWEST.spark] for pair in named(name)]
    except OperatorError as error:
        parser.error(error.what)
    outcomes: list[Outcome] = []
    for pair in pairs:
        try:
            python = environment(pair, chosen.environments)
            subprocess.run([str(python), "-c", _START], check=True, cwd=ROOT)
        except subprocess.CalledProcessError as error:
            say("", f"{pair.name} does not start here, and was NOT tested: {error}")
            is_install = "pip" in error.cmd
            has_failed = not all(outcome.passed for outcome in outcomes)
            missing = (is_install or error.returncode == UNAVAILABLE) and not has_failed
            return UNAVAILABLE if missing else 1
        for way in chosen.ways:
            say("", f"{pair.name}, accelerator {way}")
            tests = f"{FEW if chosen.few else MARK} and {WAYS[way]}"
            outcomes.append(run_on(python, pair, way, tests, shlex.split(chosen.pytest)))
            say(outcomes[-1].line())
    say("", *(outcome.line() for outcome in outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def named(name: str) -> list[Pair]:
    """Return the pairs of a name. Raise OperatorError if there is none."""
    if name == "all":
        return list(PAIRS)
    spark, _, delta = name.partition("+")
    fit = pairs_of(f"{spark}.0")
    return [pair for pair in fit if pair.delta == delta] if delta else fit[:1]


def environment(pair: Pair, folder: Path) -> Path:
    """Return the Python that has this pair, installed if it is not there."""
    there = installed()
    if (there.spark, there.delta) == pair.releases:
        return Path(sys.executable)
    target = folder / f"{pair.spark}+{pair.delta}"
    python, done = target / "bin" / "python", target / "done"
    if done.exists():
        return python
    say(f"installing {pair.name} into {target}")
    venv.create(target, with_pip=False, clear=True, symlinks=True)
    wheels = folder / "wheels"
    spark, delta = pair.releases
    wanted = [f"pyspark=={spark}", f"delta-spark=={delta}", *pair.others]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    found = ["--find-links", str(wheels), *wanted]
    subprocess.run([*pip, "wheel", "--wheel-dir", str(wheels), *found], check=True)
    into = ["--python", str(python), "install", "--no-index", *found]
    subprocess.run([*pip, *into], check=True)
    [own] = target.glob("lib/python*/site-packages")
    behind = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    (own / "behind.pth").write_text("\n".join(behind) + "\n", encoding="utf-8")
    done.touch()
    return python


def run_on(python: Path, pair: Pair, way: str, tests: str, arguments: list[str]) -> Outcome:
    """Run tests on this pair. `way`: of WAYS; `tests`: an expression of their marks."""
    began = time.monotonic()
    # (others import what this Spark may lack)
    files = [
        p for p in (ROOT / "tests" / "spark").glob("test_*.py") if MARK in p.read_text("utf-8")
    ]
    # (a test that ends in the middle of a call of the JVM makes all later ones fail)
    options = ["-q", "--timeout=3600", "-m", tests]
    command = [str(python), "-m", "pytest", *options, *map(str, sorted(files))]
    code, line = run_pytest([*command, *arguments], os.environ | {VARIABLE: way})
    passed = code == 0 or (code == NOTHING_FOUND and bool(arguments))
    name = f"{pair.name}, accelerator {way}"
    said = line if code in {0, 1} else f"{line} (exit code {code})"
    return Outcome(name, (), passed, said, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
