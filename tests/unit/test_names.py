"""A name has one meaning: what keeps the names in order."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_class_name_exists_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in ("ingestd", "spark_jobs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


MOST_CLASSES = 8
STANDARD_METHODS = {"parse": "the constructor of a value from its text"}
"""Methods that more classes may have, and why; besides those of Protocols."""


def test_a_method_name_tells_its_object() -> None:
    """A call of `take` could be one of eighteen: a verb that many classes have gets its object."""
    classes: defaultdict[str, set[str]] = defaultdict(set)
    of_protocols: set[str] = set()
    for package in ("ingestd", "spark_jobs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ClassDef):
                    continue
                methods = {
                    method.name
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                if any("Protocol" in ast.unparse(base) for base in node.bases):
                    of_protocols |= methods
                for name in methods:
                    classes[name].add(node.name)
    assert len(classes) > 1000
    exempt = of_protocols | set(STANDARD_METHODS)
    assert {
        name: sorted(found)
        for name, found in classes.items()
        if len(found) > MOST_CLASSES and not name.startswith("__") and name not in exempt
    } == {}
