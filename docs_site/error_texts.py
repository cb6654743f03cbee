"""The texts of errors in the code, with a placeholder for each part that varies.

Texts are rendered from the syntax tree; no code is run. A name that stands for a text is looked up
in its function, then in its module; if it is unknown, it becomes `<name>`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

KINDS = {
    "OperatorError": "operator",
    "TransientError": "transient",
    "TableError": "table",
    "TableChangedError": "table, re-read",
    "TableReplacedError": "table, re-read",
    "AppendedByAnotherError": "operator",
    "AllegedTakeoverError": "operator",
    "DamagedError": "operator",
    "ProtocolError": "operator",
    "ConfigError": "usage",
    "KeyPathError": "usage",
    "ValueError": "usage",
    "RefusedError": "refused",
}
_TEXT_SECOND = {
    "TableError",
    "TableChangedError",
    "TableReplacedError",
    "KeyPathError",
    "RefusedError",
}
"""Classes whose first argument is a place or method, and whose second argument is the text."""
_MOST = 6
"""Maximum number of alternatives of one text; with more it is shown as a placeholder."""
_ONLY_PLACEHOLDERS = re.compile(r"(?:<[^<>]*>|[\s:.,;()/-])*\Z")
_LIST = (ast.ListComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True, order=True)
class Text:
    """An error's text; `reason`: the constant word of a transient error."""

    what: str
    kind: str
    remedy: str
    reason: str


def texts(path: Path, kinds: Sequence[str]) -> Iterator[Text]:
    """Yield the texts of the errors of these classes that a module creates."""
    source = path.read_text("utf-8")
    if not any(kind in source for kind in kinds):
        return
    tree = ast.parse(source)
    for scope, call in _calls(tree):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        at = int(name in _TEXT_SECOND)
        if name in kinds and len(call.args) > at:
            known = _Known(tree, scope, call.lineno)
            said = {k.arg: known.render(k.value) for k in call.keywords}
            remedies = said.get("remedy", [""])
            whats = known.render(call.args[at])
            reason = " / ".join(said.get("reason", []))
            aligned = len(remedies) == len(whats)
            for number, what in enumerate(whats):
                remedy = remedies[number] if aligned else " / ".join(remedies)
                if not _ONLY_PLACEHOLDERS.match(what):
                    remedy = "" if _ONLY_PLACEHOLDERS.match(remedy) else remedy
                    yield Text(what, KINDS[name], remedy, reason)


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield each call with the innermost function that contains it."""
    inner: dict[ast.Call, ast.AST] = {}
    for scope in ast.walk(tree):  # outer functions first, so the innermost one is kept
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            inner |= {c: scope for c in ast.walk(scope) if isinstance(c, ast.Call)}
    for call, scope in inner.items():
        yield scope, call


class _Known:
    """The values of names at the place where an error is created."""

    def __init__(self, tree: ast.Module, scope: ast.AST, line: int) -> None:
        self._scopes = (scope, tree)
        self._line = line
        self._open: set[str] = set()

    def render(self, node: ast.expr) -> list[str]:  # noqa: C901, PLR0911, PLR0912 - a case a kind
        """Return the possible texts of an expression."""
        match node:
            case ast.Constant():
                return [str(node.value)] if node.value is not None else [""]
            case ast.JoinedStr():
                return self._joined(node.values)
            case ast.FormattedValue():
                return self.render(node.value)
            case ast.BinOp(op=ast.Add()):
                return self._joined([node.left, node.right])
            case ast.IfExp():
                return _few([*self.render(node.body), *self.render(node.orelse)], "text")
            case ast.BoolOp():
                return _few([t for v in node.values for t in self.render(v) if t], "text")
            case ast.Name():
                return self._named(node.id)
            case ast.Attribute():
                return [f"<{node.attr.strip('_')}>"]
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                return [f"<{key}>"]
            case ast.Subscript():
                return self.render(node.value)
            case ast.Call(func=ast.Name(id="resnapshot_command")):
                return ["ingestd snapshot <source> <table>"]
            case ast.Call(func=ast.Name(id="str" | "repr" | "identifier" | "said"), args=[only]):
                return self.render(only)
            case ast.Call(func=ast.Attribute(attr="join"), args=[only]):
                inside = only.elt if isinstance(only, _LIST) else only
                return [f"<{t.strip('<>')}>" for t in self.render(inside)][:1]
            case ast.Call(func=ast.Attribute(attr="as_string" | "decode" | "format", value=value)):
                return self.render(value)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return [f"<{name.strip('_')}>"]
        return ["<...>"]

    def _joined(self, parts: Sequence[ast.expr]) -> list[str]:
        made = [""]
        for part in parts:
            texts = self.render(part)
            if len(made) * len(texts) > _MOST:
                texts = ["<...>"]
            made = [before + text for before in made for text in texts]
        return made

    def _named(self, name: str) -> list[str]:
        if name in self._open:
            return [f"<{name}>"]
        self._open.add(name)
        try:
            for scope in self._scopes:
                values = list(_assigned(scope, name, self._line))
                if name == "msg":  # assigned just before it is raised
                    values = values[-1:]
                found = [t for v in values for t in self.render(v)]
                if found:
                    return _few(found, name)
            return [f"<{name.strip('_')}>"]
        finally:
            self._open.discard(name)


def _assigned(scope: ast.AST, name: str, line: int) -> Iterator[ast.expr]:
    """Yield the expressions that are assigned to a name, ordered by line."""
    is_module = isinstance(scope, ast.Module)
    found = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    made = [n for n in found if isinstance(n, ast.Assign | ast.AnnAssign)]
    for each in sorted(made, key=lambda n: n.lineno):
        if each.lineno > line and not is_module:
            continue
        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
        for target in targets:
            value = each.value
            if isinstance(target, ast.Name) and target.id == name and value is not None:
                yield value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for part, its in zip(target.elts, value.elts, strict=False):
                    if isinstance(part, ast.Name) and part.id == name:
                        yield its


def _few(found: Sequence[str], name: str) -> list[str]:
    kept = list(dict.fromkeys(found))
    return kept if len(kept) <= _MOST else [f"<{name}>"]
