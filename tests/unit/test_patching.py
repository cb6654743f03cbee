"""Tests pass values, and ask what is public: they replace almost no name of the product."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
OURS = ("ingestd", "spark_jobs", "tests")
PATCHES = {"mock.patch", "mock.patch.object", "patch", "patch.object"}

REPLACED = {
    "fuzz/test_fuzz.py: *WRONG[target]": "a fault in a plain decoder must be found",
    "fuzz/test_fuzz.py: ColumnarDecoder": "so must an error of the wrong kind",
    "harness/channels.py: choice": "no TLS session can be read, so libpq reads",
    "integration/test_catch_up.py: drain_slot": "the server fails at a query",
    "integration/test_catch_up.py: refused": "one kind of connection is refused",
    "integration/test_cli_drop.py: ControlConnection": "a session outlives its client",
    "integration/test_large_definitions.py: LimitedConnection": "all sessions have a low limit",
    "integration/test_large_definitions.py: place": "an error that no known definition causes",
    "integration/test_pinned_settings.py: session": "a DSN can't ask for another encoding",
    "integration/test_polling_sweep.py: KeyPages": "a page fails as it is read",
    "spark/test_driver_merge.py: driver_files": "a local folder stands for an object store",
    "unit/app/test_lakes.py: factories": "a source of the fakes stands in for Postgres",
    "unit/decode/conftest.py: native": "decoding as where there was no C compiler",
}
"""What tests replace, and why nothing else would do; the list only shrinks."""

FOREIGN = {
    "spark/test_connect.py": 1,  # its server
    "spark/test_datasource_filters.py": 1,  # Spark's plan
    "spark/test_deploy.py": 1,  # Spark's JVM
}
"""Where tests use private attributes of a library, and how many."""


def test_few_names_of_ours_are_replaced() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()}: {target}"
        for path in sorted(TESTS.rglob("*.py"))
        if re.search("setattr|patch", text := path.read_text("utf-8"))
        for target in _replaced(ast.parse(text))
    }
    assert found <= REPLACED.keys(), found - REPLACED.keys()


def test_private_attributes_are_of_libraries_only() -> None:
    """Ruff's SLF001 finds the others."""
    project = (TESTS.parent / "pyproject.toml").read_text("utf-8")
    assert "SLF001" not in project
    noted = re.compile(r"# noqa:.*\bSLF001\b")
    found = {
        path.relative_to(TESTS).as_posix(): len(noted.findall(path.read_text("utf-8")))
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
    }
    assert {name: count for name, count in found.items() if count} == FOREIGN


def _replaced(module: ast.Module) -> list[str]:
    """Return what a module replaces, except what it imports from others."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]: node.module or ""
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } | {
        (alias.asname or alias.name).partition(".")[0]: alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = []
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        if not called.endswith(".setattr") and called not in PATCHES:
            continue
        target = node.args[0]
        text = ast.unparse(target)
        is_text = isinstance(target, ast.Constant | ast.JoinedStr)
        root = text.lstrip("f'\"") if is_text else re.split(r"\W", text)[0]
        origin = root if is_text else imported.get(root, OURS[0])
        if origin.startswith(OURS):
            found.append(text)
    return found
