"""Imports point in one direction, from folder to folder and within each folder."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.source_code import READS_CODE, ROOT, modules, statements, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = READS_CODE
PACKAGES = ("ingestd", "spark_jobs", "benchmarks")

LAYERS = (
    "__init__",
    "model",
    "config digests failpoints process",
    "ports",
    "decode observe",
    "catalogs http lake pipeline postgres",
    "app reading terminal testing",
    "demo",
    "cli",
    "__main__",
)
"""The first part of a module's name below `ingestd`; a layer may import those above it here."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts.split()}

KEPT_OUT = {
    "pipeline": {"psycopg", "deltalake"},
    "postgres": {"deltalake"},
    "lake": {"psycopg"},
    "decode": {"psycopg", "deltalake", "asyncio", "socket"},
    "observe": {"psycopg", "deltalake"},
    "http": {"psycopg", "deltalake"},
    "app": {"psycopg", "deltalake"},
    "terminal": {"deltalake"},
    "cli": {"deltalake"},
}
"""Libraries that a folder does not know of."""

KNOW_THE_LAKE = {"lake", "reading", "testing", "demo"}
"""Parts that may import `ingestd.lake`: the API, the oracle and the demo read what users read.

So may the registry of lakes, and `spark_jobs`, whose jobs read and write Delta tables by design.
All others know `ingestd.ports` alone.
"""
REGISTRY = "ingestd.app.lakes"
API = ("ingestd.app.capture", "ingestd.reading.lake")
"""What `ingestd` itself offers; imported when it is used."""

LOOSE = {
    "benchmarks": {"__init__", "__main__", "plots", "reach", "wider"},
    "ingestd": {"__init__", "__main__", "failpoints"},
    "spark_jobs": {
        "__init__",
        "backfill",
        "datasource",
        "epochs",
        "feed",
        "history",
        "mirror",
        "own_session",
        "pairs",
        "reconcile",
        "session",
        "spark_errors",
    },
}
"""The modules beside the folders: entry points, and what all of them need."""

MOST_MODULES = 20
"""In one folder."""


def imports(
    source: str, module: str, *, is_package: bool = False, at_runtime: bool = False
) -> Iterator[str]:
    """Return the names that a module's text imports, at any depth.

    `at_runtime`: without those that are for types only.
    """
    parents = module.split(".") if is_package else module.split(".")[:-1]
    skipped = {
        id(inner)
        for node in statements(source)
        if at_runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in statements(source):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{name}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """Return the part of ingestd that a dotted name is in."""
    part = name.split(".")[1] if "." in name else "__init__"
    # `from ingestd import __version__` is of the package itself
    return "__init__" if part.startswith("__") and part != "__main__" else part


def faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return which imports of a module go against the layers."""
    own = part_of(module)
    if own not in RANK:
        return [f"{module} is in no layer"]
    found = []
    for name in imports(source, module, is_package=is_package):
        banned = {b for b in KEPT_OUT.get(own, ()) if name == b or name.startswith(f"{b}.")}
        if banned:
            found.append(f"{module} imports {name}")
        elif module == "ingestd" and name.startswith(API):
            continue
        elif name.split(".")[0] == "ingestd":
            target = part_of(name)
            if target not in RANK:
                found.append(f"{module} imports {name}, which is in no layer")
                continue
            is_upwards = target != own and RANK[target] >= RANK[own]
            is_lake = target == "lake" and own not in KNOW_THE_LAKE and module != REGISTRY
            if is_upwards or is_lake:
                found.append(f"{module} imports {name}")
    return found


def module_name(path: Path) -> str:
    """Return a file's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def child_of(folder: str, name: str) -> str:
    """Return the part of a folder, by its dotted name, that a name in it belongs to."""
    return ".".join(name.split(".")[: folder.count(".") + 2])


def circles(runtime: Mapping[str, set[str]], typed: Mapping[str, set[str]]) -> list[str]:
    """Return the circles among the parts of each folder.

    Modules of one folder may name each other's types: between folders these count as well.
    """
    folders = {
        ".".join(module.split(".")[:n]) for module in typed for n in range(1, module.count(".") + 1)
    }
    found = []
    for folder in sorted(folders):
        graph: dict[str, set[str]] = defaultdict(set)
        for module, names in typed.items():
            if not module.startswith(f"{folder}."):
                continue
            own = child_of(folder, module)
            for name in names:
                other = child_of(folder, name)
                is_between_folders = own != module or other in folders
                if (
                    name.startswith(f"{folder}.")
                    and other != own
                    and (is_between_folders or name in runtime[module])
                ):
                    graph[own].add(other)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(" -> ".join(error.args[1]))
    return found


@cache
def read_modules(package: str) -> dict[str, tuple[str, bool]]:
    """Return text of each module, and whether it is a folder's `__init__`, by dotted name."""
    return {
        module_name(path): (text_of(path), path.name == "__init__.py") for path in modules(package)
    }


def test_imports_point_downwards() -> None:
    texts = read_modules("ingestd")
    assert len(texts) > 20
    found = [
        fault
        for module, (source, is_package) in texts.items()
        for fault in faults(source, module, is_package=is_package)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_a_circle(package: str) -> None:
    texts = read_modules(package)

    def imported(*, at_runtime: bool) -> dict[str, set[str]]:
        return {
            module: set(imports(source, module, is_package=is_package, at_runtime=at_runtime))
            for module, (source, is_package) in texts.items()
        }

    assert circles(imported(at_runtime=True), imported(at_runtime=False)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_are_small(package: str) -> None:
    loose = {path.stem for path in (ROOT / package).glob("*.py")}
    assert loose == LOOSE[package]
    sizes = {
        folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        for folder in (ROOT / package).rglob("*/")
    }
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ingestd.lake.raw_table", "from ingestd.postgres import wal"),
        ("ingestd.postgres.wal", "import ingestd.lake.raw_table"),
        ("ingestd.postgres.wal", "from ..lake import raw_table"),
        ("ingestd.postgres.wal", "from ingestd.pipeline.pipeline import Pipeline"),
        ("ingestd.pipeline.pipeline", "from ingestd.lake.raw_table import x"),
        ("ingestd.pipeline.pipeline", "def f():\n    import psycopg.pq"),
        ("ingestd.pipeline.pipeline", "from deltalake import DeltaTable"),
        ("ingestd.decode.pgoutput", "import asyncio"),
        ("ingestd.decode.pgoutput", "from ingestd.observe import metrics"),
        ("ingestd.ports", "if TYPE_CHECKING:\n    from ingestd.decode import type_mapping"),
        ("ingestd.observe.status", "from ingestd import http"),
        ("ingestd.lake.raw_table", "from . import x\nfrom ingestd.testing.fakes import FakeSink"),
        ("ingestd.helpers", "import os"),
        ("ingestd.cli", "from ingestd.nowhere import x"),
        ("ingestd.cli.completion", "from ingestd.lake.layout import Layout"),
        ("ingestd.app.build", "if TYPE_CHECKING:\n    from ingestd.lake.delta_lake import x"),
        ("ingestd.app.peek", "from deltalake import DeltaTable"),
    ],
)
def test_the_checker_sees_a_wrong_import(module: str, source: str) -> None:
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ingestd.lake.raw_table",
            "import deltalake\nfrom . import x\nfrom ingestd.ports import Sink",
        ),
        ("ingestd.pipeline.pipeline", "from ingestd.observe.metrics import Metrics"),
        ("ingestd.app.build", "from ingestd.postgres import wal\nfrom ingestd.ports import Sink"),
        ("ingestd.app.lakes", "def f():\n    from ingestd.lake import factory"),
        ("ingestd.ports", "from ingestd.model.changes import ChangeSet"),
        ("ingestd.config", "from ingestd import __version__"),
        ("ingestd.__main__", "from ingestd.cli import main"),
    ],
)
def test_the_checker_lets_right_imports_be(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_the_checker_sees_circles() -> None:
    of_folders = {"a.b.x": {"a.c.y.f"}, "a.c.z": {"a.b.w"}, "a.c.y": set(), "a.b.w": set()}
    assert len(circles(of_folders, of_folders)) == 1
    of_modules: dict[str, set[str]] = {"a.x": {"a.y"}, "a.y": {"a.x"}}
    assert len(circles(of_modules, of_modules)) == 1
    assert circles({"a.x": {"a.y"}, "a.y": set()}, of_modules) == []
