"""Finds SQL built as text, out of which a name or a value could break.

The arguments of `execute`, `copy`, `sql.SQL` and the like must be literals, constants made of
literals, or composed by `psycopg.sql`. Their origin is traced through names, annotations of
parameters, and return annotations of functions.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from tests.harness.source_code import ROOT, parsed, text_of

SINKS = frozenset(
    [
        "SQL",
        "execute",
        "executemany",
        "copy",
        "stream",
        "send_query",
        "send_query_params",
        "exec_",
        "exec_params",
    ]
)
_COMPOSING = frozenset(["SQL", "Identifier", "Literal", "Composed", "Placeholder"])
_COMPOSED = re.compile(r"((list|Sequence|Iterable|tuple)\[)?(sql\.|LiteralString|Compos(ed|able))")
"""Annotations of composed SQL, of literals, and of sequences of them."""
_TEXT_METHODS = frozenset(["encode", "as_bytes", "as_string"])


@dataclass(frozen=True, slots=True)
class Built:
    """A text that is built, or has an unknown origin, and is passed to `sink` as `argument`."""

    module: str
    line: int
    sink: str
    argument: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.sink}({self.argument})"


@dataclass(slots=True)
class _Scope:
    """The names of a module or of a function in it."""

    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


def built_texts(source: str, module: str = "module.py") -> list[Built]:
    """Return the faults in a module's text."""
    tree = parsed(source)
    outer = _scope_of(tree)
    found = []
    for scope, calls in _calls(tree, [outer]):
        for call, name in calls:
            checker = _Checker(scope)
            if call.args and not checker.is_safe(call.args[0]):
                found.append(Built(module, call.lineno, name, ast.unparse(call.args[0])))
    return sorted(found, key=lambda b: b.line)


def _calls(
    node: ast.AST, scopes: list[_Scope]
) -> list[tuple[list[_Scope], list[tuple[ast.Call, str]]]]:
    """Return the calls of sinks in each function, with the scopes visible there."""
    found = []
    own: list[tuple[ast.Call, str]] = []
    for inner in _body(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += _calls(inner, [*scopes, _scope_of(inner)])
        elif isinstance(inner, ast.Call) and (name := _name(inner.func)) in SINKS:
            own.append((inner, name))
    return [(scopes, own), *found]


def _body(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of a module or function, without those of inner functions."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        inner = waiting.pop()
        found.append(inner)
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(inner)
    return found


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _scope_of(node: ast.AST) -> _Scope:
    scope = _Scope()
    arguments = getattr(node, "args", None)
    if isinstance(arguments, ast.arguments):
        for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            scope.annotations[a.arg] = ast.unparse(a.annotation) if a.annotation else "?"
    for inner in _body(node):
        _bind_all(scope, inner)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.returns[inner.name] = ast.unparse(inner.returns) if inner.returns else "?"
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            for alias in inner.names:
                scope.imports[alias.asname or alias.name] = (inner.module, alias.name)
    return scope


def _bind_all(scope: _Scope, inner: ast.AST) -> None:
    if isinstance(inner, ast.Assign):
        for target in inner.targets:
            _bind(scope, target, inner.value)
    elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
        scope.annotations[inner.target.id] = ast.unparse(inner.annotation)
        if inner.value is not None:
            _bind(scope, inner.target, inner.value)
    elif isinstance(inner, ast.AugAssign | ast.NamedExpr):
        _bind(scope, inner.target, inner.value)
    elif isinstance(inner, ast.For | ast.AsyncFor):
        _bind(scope, inner.target, inner.iter)


def _bind(scope: _Scope, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        scope.values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple):
        for part in target.elts:
            _bind(
                scope, part, ast.Constant(value=None) if isinstance(value, ast.Constant) else value
            )


@cache
def _module(dotted: str) -> _Scope | None:
    path = ROOT / (dotted.replace(".", "/") + ".py")
    return _scope_of(parsed(text_of(path))) if path.exists() else None


class _Checker:
    def __init__(self, scopes: list[_Scope]) -> None:
        self._scopes = scopes
        self._seen: set[str] = set()

    def is_safe(self, e: ast.expr) -> bool:  # noqa: PLR0911 - one for each kind
        """Return whether a text consists only of literals, or is made by psycopg.sql."""
        if isinstance(e, ast.Constant):
            return True
        if isinstance(e, ast.JoinedStr):
            return all(map(self.is_safe, e.values))
        if isinstance(e, ast.FormattedValue):
            # `d` takes whole numbers only, and raises for anything else
            spec = ast.unparse(e.format_spec) if e.format_spec else ""
            return spec.strip("f'\"") == "d" or self.is_safe(e.value)
        if isinstance(e, ast.BinOp):
            return self.is_safe(e.left) and self.is_safe(e.right)
        if isinstance(e, ast.IfExp):
            return self.is_safe(e.body) and self.is_safe(e.orelse)
        if isinstance(e, ast.BoolOp):
            return all(map(self.is_safe, e.values))
        if isinstance(e, ast.Tuple | ast.List | ast.Set):
            return all(map(self.is_safe, e.elts))
        if isinstance(e, ast.Starred | ast.Await):
            return self.is_safe(e.value)
        if isinstance(e, ast.Name):
            return self._is_safe_name(e.id)
        return isinstance(e, ast.Call) and self._is_safe_call(e)

    def _is_safe_call(self, call: ast.Call) -> bool:
        name = _name(call.func)
        if name in _COMPOSING:
            return True  # the argument of `SQL` is checked separately
        if isinstance(call.func, ast.Attribute):
            receiver = call.func.value
            if name in _TEXT_METHODS:
                return self.is_safe(receiver)
            if self._is_composed(receiver):
                return name in {"format", "join"}
            return name in {"format", "join", "replace"} and all(
                map(self.is_safe, [receiver, *call.args, *(k.value for k in call.keywords)])
            )
        return self._returns_composed(name)

    def _is_composed(self, e: ast.expr) -> bool:
        """Return whether this is an object of psycopg.sql, whose methods compose."""
        if isinstance(e, ast.Call):
            name = _name(e.func)
            inner = e.func.value if isinstance(e.func, ast.Attribute) else None
            if name in {"format", "join"} and inner is not None:
                return self._is_composed(inner)
            return name in _COMPOSING or (inner is None and self._returns_composed(name))
        if isinstance(e, ast.BinOp):
            return self._is_composed(e.left) and self._is_composed(e.right)
        if not isinstance(e, ast.Name):
            return False
        values, annotation = self._look_up(e.id)
        if annotation is not None and _COMPOSED.match(annotation):
            return True
        return bool(values) and all(map(self._is_composed, values))

    def _is_safe_name(self, name: str) -> bool:
        if name in self._seen:
            return True  # it is built from itself: the other values decide
        self._seen.add(name)
        values, annotation = self._look_up(name)
        if annotation is not None and _COMPOSED.match(annotation):
            return True
        return bool(values) and all(map(self.is_safe, values))

    def _look_up(self, name: str) -> tuple[list[ast.expr], str | None]:
        for scope in reversed(self._scopes):
            if name in scope.values or name in scope.annotations:
                return scope.values.get(name, []), scope.annotations.get(name)
            if name in scope.imports:
                module, there = scope.imports[name]
                found = _module(module)
                if found is None:
                    return [], None
                self._scopes = [found, *self._scopes]
                return found.values.get(there, []), found.annotations.get(there)
        return [], None

    def _returns_composed(self, function: str) -> bool:
        for scope in reversed(self._scopes):
            if function in scope.returns:
                return bool(_COMPOSED.match(scope.returns[function]))
            if function in scope.imports:
                module, there = scope.imports[function]
                found = _module(module)
                return found is not None and bool(_COMPOSED.match(found.returns.get(there, "")))
        return False
