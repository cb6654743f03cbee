"""Imports point downwards only (design section 8.1)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ingestd

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(ingestd.__file__).parent

VOCABULARY = (
    "__init__ allocation changes checks config config_errors errors failpoints files importing "
    "incomplete_rows keys open_files ports positions predicates quantities recorded redaction "
    "references row_digests row_limit schema terminal_text value_hashes verification visibility"
)
EDGE = (
    "__main__ app checks_table cli demo drop_command grid lake_listing lake_look pause_command "
    "reloading snapshot_command snapshot_display starter status_table status_watch table_bars "
    "table_listing table_report verify_display verify_report"
)
LAYERS = (VOCABULARY, "decode observe", "capture sink fakes", "run", EDGE)
"""The first part of a module's name below `ingestd`; a layer may import those above it here."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts.split()}
FREE = (0, len(LAYERS) - 1)
"""Layers whose modules may import each other: the vocabulary, and the edge."""

KEPT_OUT = {
    "run": {"ingestd.postgres", "ingestd.lake", "psycopg", "deltalake"},
    "capture": {"deltalake"},
    "sink": {"psycopg"},
    "decode": {"psycopg", "deltalake", "asyncio", "socket"},
    "observe": {"psycopg", "deltalake"},
}
"""What a package does not know of."""


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Give the names that a module's text imports, at any depth, those for types too."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{name}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """Name the part of ingestd that a dotted name is in."""
    part = name.split(".")[1] if "." in name else "__init__"
    # `from ingestd import __version__` is of the package itself
    return "__init__" if part.startswith("__") and part != "__main__" else part


def faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Say which imports of a module go against the direction."""
    own = part_of(module)
    if own not in RANK:
        return [f"{module} is in no layer"]
    found = []
    for name in imports(source, module, is_package=is_package):
        banned = {b for b in KEPT_OUT.get(own, ()) if name == b or name.startswith(f"{b}.")}
        if banned:
            found.append(f"{module} imports {name}")
        elif name.split(".")[0] == "ingestd":
            target = part_of(name)
            if target not in RANK:
                found.append(f"{module} imports {name}, which is in no layer")
            elif target != own and not is_below(target, own):
                found.append(f"{module} imports {name}")
    return found


def is_below(target: str, own: str) -> bool:
    return RANK[target] < RANK[own] or (RANK[target] == RANK[own] and RANK[own] in FREE)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_point_downwards() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 20
    found = [
        fault
        for path in paths
        for fault in faults(
            path.read_text("utf-8"), module_name(path), is_package=path.name == "__init__.py"
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ingestd.lake.raw_table", "from ingestd.postgres import wal"),
        ("ingestd.postgres.wal", "import ingestd.lake.raw_table"),
        ("ingestd.postgres.wal", "from ..sink import raw"),
        ("ingestd.postgres.wal", "from ingestd.pipeline.pipeline import Pipeline"),
        ("ingestd.pipeline.pipeline", "from ingestd.lake.raw_table import x"),
        ("ingestd.pipeline.pipeline", "def f():\n    import psycopg.pq"),
        ("ingestd.pipeline.pipeline", "from deltalake import DeltaTable"),
        ("ingestd.decode.pgoutput", "import asyncio"),
        ("ingestd.decode.pgoutput", "from ingestd.observe import metrics"),
        ("ingestd.ports", "if TYPE_CHECKING:\n    from ingestd.decode import types"),
        ("ingestd.http.server", "from ingestd import app"),
        ("ingestd.lake.raw_table", "from . import x\nfrom ingestd.testing.fakes import FakeSink"),
        ("ingestd.helpers", "import os"),
        ("ingestd.cli", "from ingestd.nowhere import x"),
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
        ("ingestd.app", "from ingestd.postgres import wal\nfrom ingestd.lake import raw"),
        ("ingestd.ports", "from ingestd.model.changes import Chunk"),
        ("ingestd.config", "from ingestd import __version__"),
        ("ingestd.__main__", "from ingestd.cli import main"),
    ],
)
def test_the_checker_lets_right_imports_be(module: str, source: str) -> None:
    assert faults(source, module) == []
