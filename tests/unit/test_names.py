"""A name has one meaning, and says it in the words of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from tests.harness.source_code import (
    READS_CODE,
    modules,
    name_of,
    parsed,
    statements,
    text_of,
    walk_statements,
)

pytestmark = READS_CODE
LONGEST_TEST_NAME = 60
VAGUE = re.compile(
    "_(anew|told|nobody|somebody|whoever|gone|looked|is_there|goes_on|go_on|by_itself)(_|$)"
)


ALIAS = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*\Z")


def type_aliases(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the public type aliases at module level, and the type that each stands for."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign) and is_type(node.value):
            targets = node.targets
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and ALIAS.match(target.id) and node.value is not None:
                yield target.id, ast.unparse(node.value)


def is_type(value: ast.expr) -> bool:
    """Return whether an expression can be a type: a name, `X[...]` or `X | Y`."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.BitOr) and is_type(value.left)
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript)


def test_the_name_of_a_class_or_type_alias_exists_once() -> None:
    """An alias may be repeated where it is the same type, as an array of numbers is."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    aliases: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for path in modules("ingestd", "spark_jobs", "benchmarks"):
        for node in statements(text_of(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name_of(path))
        for name, of_type in type_aliases(parsed(text_of(path))):
            aliases[name][of_type] = name_of(path)
    assert len(classes) > 500
    assert len(aliases) > 50
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
    assert {name: found for name, found in aliases.items() if len(found) > 1} == {}
    assert aliases.keys() & classes.keys() == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Work = Callable[[], None]", ["Work"]),
        ("Give: TypeAlias = 'Later'", ["Give"]),
        ("Item = int | str", ["Item"]),
        ("T = TypeVar('T')\nOPS = int\n_Own = int\nMost = 7\nNames = {'a'}", []),
    ],
)
def test_a_type_alias_is_found(text: str, found: list[str]) -> None:
    assert [name for name, _ in type_aliases(ast.parse(text))] == found


MOST_CLASSES = 8
STANDARD_METHODS = {"parse": "the constructor of a value from its text"}
"""Methods that more classes may have, and why; besides those of Protocols."""


def test_a_method_name_tells_its_object() -> None:
    """A call of `take` could be one of eighteen: a verb that many classes have gets its object."""
    classes: defaultdict[str, set[str]] = defaultdict(set)
    of_protocols: set[str] = set()
    for path in modules("ingestd", "spark_jobs"):
        for node in statements(text_of(path)):
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


@cache
def names_by_scope() -> list[tuple[str, bool, list[str]]]:
    """Return the path of a file, whether the scope is a module or class, and the tests in it.

    The trees of all tests together would fill the memory: they are not kept.
    """
    return [
        (name_of(path), isinstance(scope, ast.Module | ast.ClassDef), names)
        for path in modules("tests")
        for scope in walk_statements(ast.parse(path.read_text("utf-8")))
        if (names := list(names_in(scope)))
    ]


def names_in(scope: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(scope):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_"):
            yield name


def test_names_of_tests_are_short_and_in_words_of_the_field() -> None:
    names = {f"{path}::{name}": name for path, _, found in names_by_scope() for name in found}
    assert len(names) > 2000
    assert [at for at, name in names.items() if len(name) > LONGEST_TEST_NAME] == []
    assert [at for at, name in names.items() if VAGUE.search(name)] == []


def test_a_test_name_exists_once_in_its_file() -> None:
    """Python keeps the last function of a name: the others would silently not run."""
    scopes = [(path, names) for path, is_scope, names in names_by_scope() if is_scope]
    assert sum(len(names) for _, names in scopes) > 2000
    twice = [f"{path}::{n}" for path, names in scopes for n in set(names) if names.count(n) > 1]
    assert twice == []


WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""The words of an identifier, in any case."""
NOT_IN_NAMES = {
    *("told", "tell", "tells", "telling", "tellings"),
    *("said", "meant"),
    *("mend", "mends", "mended", "mending"),
    *("whoever", "nobody", "somebody", "anew", "forever"),
    *("go on", "goes on", "going on", "gone on"),
}
"""Words that no identifier has, as no comment has them (`test_language`)."""
STILL_NAMED = {"tell"}
"""Identifiers that have such a word: this set only shrinks. (`tell` is a method of files.)"""


def banned_words(name: str) -> set[str]:
    """Return the words, and pairs of words, of an identifier that no identifier has."""
    words = [word.lower() for word in WORDS.findall(name)]
    return NOT_IN_NAMES.intersection([*words, *map(" ".join, pairwise(words))])


def defined_names(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node defines: of functions, classes, parameters, variables."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def test_identifiers_are_in_words_of_the_field() -> None:
    found = {
        name
        for path in modules("ingestd", "spark_jobs")
        for node in ast.walk(parsed(text_of(path)))
        for name in defined_names(node)
        if banned_words(name)
    }
    assert found - STILL_NAMED == set()
    assert STILL_NAMED - found == set(), "renamed: remove them from STILL_NAMED"


@pytest.mark.parametrize("name", ["_told_at", "SAID_CHARS", "isMeant", "goes_on", "_go_on"])
def test_a_banned_identifier_is_found(name: str) -> None:
    assert banned_words(name)


@pytest.mark.parametrize("name", ["saids", "cargo_on", "_go_online", "tellurium"])
def test_only_complete_words_are_banned(name: str) -> None:
    assert not banned_words(name)
