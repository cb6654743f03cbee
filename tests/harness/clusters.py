"""A Python as on a cluster: the wheel is installed, Spark is the cluster's own.

No package index is asked: packages are linked from this Python's.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pyarrow as pa
from packaging.requirements import Requirement

from ingestd.model.schema import Column, Table, TableId

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = ROOT / "deploy" / "cluster-requirements.txt"
ENTRY = ROOT / "deploy" / "spark_entry.py"
OF_THE_CLUSTER = ("pyspark", "py4j")
ORDERS = Table(
    TableId("public", "orders"),
    1,
    (
        Column("id", 20, -1, pa.int64(), "bigint", identity=True),
        Column("note", 25, -1, pa.string(), "text"),
    ),
    "d",
    ("id",),
    ("id",),
)
"""A table to mirror."""
_SOURCES = ("ingestd", "spark_jobs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def requirements(path: Path = REQUIREMENTS) -> list[Requirement]:
    """Return the lines of a requirements file."""
    lines = path.read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout below `folder`, without its C part; return its path."""
    source = folder / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for name in _SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=unwanted)
        else:
            shutil.copy(path, source / name)
    target = folder / "dist"
    own_setuptools = ["--no-build-isolation", "--no-deps", "--no-index"]
    pip("wheel", *own_setuptools, "--wheel-dir", target, source, environment={"CC": "false"})
    [wheel] = target.glob("*.whl")
    return wheel


def cluster_python(folder: Path, wheel: Path | None, listed: Iterable[Requirement]) -> Path:
    """Return the Python of a fresh environment with exactly these packages, and the cluster's."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    for name in _closure([*listed, *map(Requirement, OF_THE_CLUSTER)]):
        distribution = metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or ()}
        for top in tops - {"..", "__pycache__"}:
            there = Path(str(distribution.locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
    if wheel is not None:
        pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    return python


def _closure(listed: Iterable[Requirement]) -> set[str]:
    found: set[str] = set()
    waiting = [(r.name, tuple(r.extras)) for r in listed]
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in OF_THE_CLUSTER:
            continue
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                waiting.append((needed.name, tuple(needed.extras)))
    return found


def pip(*words: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run pip, quietly."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *map(str, words)], check=True, env=os.environ | (environment or {}))


def submit(
    python: Path, folder: Path, *words: str | Path, settings: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run spark-submit as a user of that cluster does, in `folder`."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_"))}
    environment |= {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
    }
    given = [word for setting in settings for word in ("--conf", setting)]
    command = [home / "bin" / "spark-submit", "--master", "local[2]", *given, *words]
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
