"""The repository's Python files, read and parsed once a process, for the tests that read them.

Those tests have the mark `READS_CODE`: pytest-xdist runs them in one process.
"""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READS_CODE = pytest.mark.xdist_group("source code")


@cache
def modules(*folders: str) -> tuple[Path, ...]:
    """Return the modules below these folders, sorted by folder and path."""
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def parsed(source: str) -> ast.Module:
    """Return a module's tree, which is kept: garbage collections pass it by."""
    _collect_once()
    tree = ast.parse(source)
    gc.freeze()
    return tree


@cache
def _collect_once() -> None:
    """Collect the garbage of the tests before, which would be kept with the trees."""
    gc.collect()


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's text, as `ast.walk` does."""
    return tuple(ast.walk(parsed(source)))


@cache
def statements(source: str) -> tuple[ast.AST, ...]:
    """Return what `walk_statements` does of a module's text."""
    return tuple(walk_statements(parsed(source)))


def walk_statements(tree: ast.Module) -> list[ast.AST]:
    """Return the statements at any depth, and what contains some: all nodes but expressions."""
    found: list[ast.AST] = [tree]
    for node in found:
        found += (c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.expr))
    return found
