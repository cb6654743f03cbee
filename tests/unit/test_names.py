"""A name has one meaning, and says it in the words of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_TEST_NAME = 60
VAGUE = re.compile(
    "_(anew|told|nobody|somebody|whoever|gone|looked|is_there|goes_on|go_on|by_itself)(_|$)"
)


def test_a_class_name_exists_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in ("ingestd", "spark_jobs", "benchmarks"):
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


def test_names_of_tests_are_short_and_in_words_of_the_field() -> None:
    names = {
        f"{path.relative_to(ROOT).as_posix()}::{node.name}": node.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    assert len(names) > 2000
    assert [at for at, name in names.items() if len(name) > LONGEST_TEST_NAME] == []
    assert [at for at, name in names.items() if VAGUE.search(name)] == []


def test_a_test_name_exists_once_in_its_file() -> None:
    """Python keeps the last function of a name: the others would silently not run."""
    twice: list[str] = []
    count = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for scope in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(scope, ast.Module | ast.ClassDef):
                continue
            names = [
                node.name
                for node in scope.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.startswith("test_")
            ]
            count += len(names)
            here = path.relative_to(ROOT).as_posix()
            twice += [f"{here}::{name}" for name in set(names) if names.count(name) > 1]
    assert count > 2000
    assert twice == []
