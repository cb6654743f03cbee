"""A pair of versions that can't work is refused with the command that installs one that does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from ingestd.model.errors import OperatorError
from spark_jobs.pairs import (
    NEWEST,
    PAIRS,
    Installed,
    Pair,
    ensure_pair,
    installed,
    minor,
    pairs_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
VERSIONS = [
    "3.2.1",
    "3.3.2",
    "3.3.3",
    "4.0.1",
    "4.1.0",
    "4.2.0",
    "4.3.0",
    "4.4.0",
    "4.4.1",
    "5.0.0",
]
SPARKS = ["3.4.4", "3.5.3", "3.5.7", "3.5.2-amzn-1", "4.0.1", "4.1.1", "4.2.0", "4.2.1", "4.3.0"]


def complete(pair: Pair) -> Installed:
    """Return what is installed where this pair works."""
    spark, delta = pair.releases
    jars = spark, pair.scala
    return Installed(spark, delta, jars, None, 17, pair.python or 13, has_pandas=True)


def after(remedy: str, before: Installed) -> Installed:
    """Return what is installed after the command of a remedy, with the lowest versions."""
    line = remedy.splitlines()[0].partition("  # ")[0]
    command, install, *wanted = shlex.split(line)
    assert (command, install) == ("pip", "install")
    found = before
    for requirement in map(Requirement, wanted):
        lowest = next(s.version for s in requirement.specifier if s.operator == ">=")
        if requirement.name == "pyspark":
            [scala] = {pair.scala for pair in pairs_of(lowest)}
            found = replace(found, spark=lowest, jars=(lowest, scala))
        elif requirement.name == "delta-spark":
            found = replace(found, delta=lowest)
        else:
            found = replace(found, has_pandas=True)
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_each_pair_is_accepted(pair: Pair) -> None:
    assert ensure_pair(complete(pair)) is pair


@pytest.mark.parametrize(("spark", "delta"), product(SPARKS, VERSIONS))
def test_other_pairs_are_refused_with_a_pair_to_install(spark: str, delta: str) -> None:
    there = complete(NEWEST)
    scala = "2.12" if spark.startswith("3.") else "2.13"
    there = replace(there, spark=spark, jars=(spark, scala), delta=delta, python=11)
    if (minor(spark), minor(delta)) in {(pair.spark, pair.delta) for pair in PAIRS}:
        found = ensure_pair(there)
        assert (found.spark, found.delta) == (minor(spark), minor(delta))
        return
    with pytest.raises(OperatorError, match=re.escape(spark)) as refused:
        ensure_pair(there)
    ensure_pair(after(str(refused.value.remedy), there))


def lacking(pair: Pair) -> Iterator[tuple[str, Installed]]:
    """Yield what is wrong, as the error says it, and where a pair lacks one thing."""
    there = complete(pair)
    spark = re.escape(pair.spark)
    yield "delta-spark is not installed", replace(there, delta=None)
    yield "Scala 2.11", replace(there, jars=(pair.releases[0], "2.11"))
    if pair.others:
        yield (
            f"pandas is not installed, which PySpark {spark} needs",
            replace(there, has_pandas=False),
        )
    if pair.python is not None:
        yield f"Spark {spark} runs on Python 3.11 and earlier, not 3.12", replace(there, python=12)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_missing_parts_are_named_with_what_installs_them(pair: Pair) -> None:
    for said, there in lacking(pair):
        with pytest.raises(OperatorError, match=said) as refused:
            ensure_pair(there)
        ensure_pair(after(str(refused.value.remedy), there))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_java_is_required_unless_it_runs_already(pair: Pair) -> None:
    for found in (None, pair.java - 1):
        there = replace(complete(pair), java=found)
        with pytest.raises(OperatorError, match=f"needs Java {pair.java} or later; found"):
            ensure_pair(there)
        assert ensure_pair(there, starts_java=False) is pair


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_deltas_python_package_is_not_required_where_spark_runs(pair: Pair) -> None:
    there = replace(complete(pair), delta=None)
    with pytest.raises(OperatorError, match="delta-spark is not installed"):
        ensure_pair(there)
    assert ensure_pair(there, starts_java=False) is pairs_of(pair.spark)[0]


def test_jars_of_another_spark_are_refused() -> None:
    there = replace(complete(NEWEST), jars=("3.5.7", "2.12"), spark_home="/opt/spark")
    with pytest.raises(OperatorError, match=r"SPARK_HOME \(/opt/spark\) are those of Spark 3.5.7"):
        ensure_pair(there)


def test_a_package_without_a_version_is_accepted() -> None:
    assert ensure_pair(replace(complete(PAIRS[1]), delta="")) is PAIRS[1]


def test_extras_are_the_pairs() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    named = {
        "spark" if n == NEWEST.spark else f"spark{n.replace('.', '')}": n
        for n in dict.fromkeys(pair.spark for pair in PAIRS)
    }
    assert {name for name in extras if name.startswith("spark")} == named.keys()
    for name, spark in named.items():
        assert extras[name] == list(pairs_of(spark)[0].requirements)


def test_what_is_installed_here_is_a_pair() -> None:
    """And it is found without an import of pyspark."""
    code = (
        "import sys; from spark_jobs.pairs import ensure_pair;"
        " print(ensure_pair(starts_java=False).name); assert 'pyspark' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    there = installed()
    assert there.spark is not None
    assert done.stdout.startswith(f"Spark {minor(there.spark)} with")
