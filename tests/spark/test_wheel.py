"""The wheel on a cluster: console scripts, spark-submit, and no more packages than listed."""

from __future__ import annotations

import importlib
import os
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from spark_jobs.lake.targets import table_path
from spark_jobs.pairs import installed, pair_of
from spark_jobs.session import DELTA_SETTINGS, LOCAL_SETTINGS, cached_jars
from tests.harness.clusters import (
    ENTRY,
    OF_THE_CLUSTER,
    ORDERS,
    ROOT,
    build_wheel,
    cluster_python,
    requirements,
    submit,
)
from tests.harness.plain_delta import read_delta
from tests.harness.raw_lake import RawLake
from tests.harness.source_code import modules

if TYPE_CHECKING:
    from pathlib import Path

JOBS = tuple(
    path.stem
    for path in sorted((ROOT / "spark_jobs").glob("*.py"))
    if "\ndef run() -> None:" in path.read_text("utf-8")
)
"""The modules that are commands."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster_python(tmp_path_factory.mktemp("cluster"), wheel, requirements())


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program outside of the checkout, without its packages."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [*map(str, words)], cwd="/", env=environment, capture_output=True, text=True, check=False
    )


def after_usage(text: str) -> str:
    return text.partition("\n\n")[2]


def help_of(job: str) -> str:
    found: str = importlib.import_module(f"spark_jobs.{job}").parser().format_help()
    return found


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    return found


@pytest.mark.parametrize("job", JOBS)
def test_console_script_is_the_module(python: Path, job: str) -> None:
    script = run(python.parent / f"ingestd-{job}", "--help")
    module = run(python, "-m", f"spark_jobs.{job}", "--help")
    assert (script.returncode, module.returncode) == (0, 0), script.stderr + module.stderr
    assert script.stdout.startswith(f"usage: ingestd-{job} ")
    assert module.stdout.startswith(f"usage: python -m spark_jobs.{job} ")
    # (lines of the usage are indented by the program's name)
    assert after_usage(script.stdout) == after_usage(module.stdout)
    assert after_usage(module.stdout).split() == after_usage(help_of(job)).split()
    wrong = run(python.parent / f"ingestd-{job}", "--no-such-option")
    assert wrong.returncode == 2


def test_a_fault_has_the_exit_code_of_the_module(python: Path, tmp_path: Path) -> None:
    given = ("--source", "shop", "--target", tmp_path, "--config", tmp_path / "absent.toml")
    script = run(python.parent / "ingestd-mirror", *given)
    module = run(python, "-m", "spark_jobs.mirror", *given)
    assert (script.returncode, script.stderr) == (module.returncode, module.stderr)
    assert script.returncode == 2
    assert "absent.toml" in script.stderr


def test_listed_packages_are_all_that_the_jobs_import(python: Path) -> None:
    paths = [path.relative_to(ROOT).with_suffix("") for path in modules("spark_jobs")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    assert len(names) > 80
    done = run(
        python, "-I", "-c", f"import importlib\nfor n in {names}: importlib.import_module(n)"
    )
    assert done.returncode == 0, done.stderr


def test_one_listed_package_less_is_not_enough(wheel: Path, tmp_path: Path) -> None:
    fewer = [r for r in requirements() if r.name != "structlog"]
    python = cluster_python(tmp_path / "cluster", wheel, fewer)
    done = run(python, "-I", "-c", "import spark_jobs.engine.epoch_run")
    assert "No module named 'structlog'" in done.stderr


def test_listed_packages_are_those_of_the_wheel() -> None:
    required = project()["dependencies"]
    assert isinstance(required, list)
    listed = {str(r) for r in requirements()}
    assert listed < {str(Requirement(text)) for text in required}
    assert not {Requirement(text).name for text in required} & set(OF_THE_CLUSTER)


def test_scripts_are_those_of_the_entry_file() -> None:
    scripts = project()["scripts"]
    assert isinstance(scripts, dict)
    assert scripts == {"ingestd": "ingestd.cli:main"} | {
        f"ingestd-{job}": f"spark_jobs.{job}:run" for job in JOBS
    }
    assert len(JOBS) >= 5
    for file in (ENTRY, ROOT / ".ci" / "package.py"):
        assert f"JOBS = {JOBS!r}".replace("'", '"') in file.read_text("utf-8")


@pytest.mark.parametrize("way", ["installed", pytest.param("py-files", marks=pytest.mark.thorough)])
def test_submitted_wheel_mirrors_a_table(
    wheel: Path, python: Path, way: str, tmp_path: Path
) -> None:
    raw = RawLake(tmp_path / "lake")
    rows = [
        {"_cdc_op": "c", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1, "id": n, "note": f"é{n}"}
        for n in range(3)
    ]
    raw.commit({ORDERS: rows})
    raw.record("live", ORDERS)
    if way == "py-files":
        python = cluster_python(tmp_path / "cluster", None, requirements())
    words: list[str | Path] = ["--py-files", wheel] if way == "py-files" else []
    there = installed()
    pair = pair_of(there.spark or "", there.delta or "")
    assert pair is not None
    jars = cached_jars(pair)
    where = [f"spark.jars.packages={pair.package}"]
    if jars is not None:
        where = [f"spark.driver.extraClassPath={os.pathsep.join(map(str, jars))}"]
    small = {name: value for name, value in LOCAL_SETTINGS.items() if name not in DELTA_SETTINGS}
    settings = [*where, *(f"{name}={value}" for name, value in small.items())]
    words += [ENTRY, "mirror", "--lake", raw.uri, "--source", raw.source, "--target", "mirror"]
    done = submit(python, tmp_path, *words, "--once", settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / table_path("mirror", "public.orders")
    newest = len(list((path / "_delta_log").glob("*.json"))) - 1
    found = read_delta(path, newest)
    assert sorted((r["id"], r["note"]) for r in found) == [(n, f"é{n}") for n in range(3)]
