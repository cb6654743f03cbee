"""Remedies that are SQL name what they mean, and hand no role's code to a more powerful one."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.harness.source_code import READS_CODE, ROOT, modules, name_of, nodes, parsed, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = READS_CODE
QUOTING = {"printed", "identifier", "qualified", "quoted", "_quoted", "printable_sql", "quote"}
"""The functions that return a name, or SQL, in which every name is quoted and printable."""
_STATEMENT = re.compile(
    r"\b(ALTER|COMMENT ON|CREATE|DEALLOCATE|DROP|GRANT|LOCK|REFRESH|REINDEX|REVOKE|SET|TRUNCATE"
    r"|VACUUM|SELECT \w+\.\w+\() ?([A-Z]{3,}|$)"
)
"""How a statement begins that an operator pastes. (SQL that is run is composed by psycopg.sql.)"""
MEANT = {
    ("ingestd/lake/delta/table_features.py", "f"): "one of _DROPPED",
    ("ingestd/lake/delta/table_features.py", "name"): "a property of this module",
    (
        "ingestd/postgres/catalog/planner_functions.py",
        "at_most(MOST_EXPRESSIONS, 'expression', total='total')",
    ): "SQL that is run",
    ("ingestd/postgres/catalog/replica_identity.py", "identity"): "a LiteralString",
    ("ingestd/postgres/catalog/trusted_types.py", "_of_operator('o')"): "SQL that is run",
    (
        "ingestd/postgres/catalog/trusted_types.py",
        "_untrusted('SELECT k.castfunc')",
    ): "SQL that is run",
    ("ingestd/postgres/catalog/trusted_types.py", "functions"): "SQL that is run",
    ("ingestd/postgres/catalog/trusted_types.py", "is_trusted('s.typowner')"): "SQL that is run",
    ("ingestd/postgres/catalog/trusted_types.py", "t"): "SQL that is run",
    ("ingestd/postgres/polling/keys/unique_keys.py", "how"): "a text of this module",
    ("ingestd/postgres/polling/keys/unique_keys.py", "at(table, 'key')"): "a key of the config",
    ("ingestd/postgres/rewrites/ddl_script.py", "name"): "a name that our script creates",
}
"""Names in such texts that are not quoted, and why they may be given."""
RUN_BY_SPARK = "spark_jobs/delta_log/statements.py"
"""Has statements that are run: `test_statements.py` checks what it quotes."""
BY_SERVER = {
    (
        "ingestd/postgres/catalog/planner_functions.py",
        "ALTER TABLE",
    ): "printable_sql in _refusal",
    ("ingestd/postgres/catalog/planner_functions.py", "DROP INDEX"): "the same",
    ("ingestd/postgres/catalog/planner_functions.py", "DROP STATISTICS"): "the same",
    ("ingestd/postgres/catalog/replica_identity.py", "ALTER TABLE"): "run by the same statement",
}
"""Statements that the server composes, so that it quotes names, and what makes them printable."""
_BY_SERVER = re.compile(r"format\(\s*'((?:ALTER|CREATE|DROP|GRANT|REVOKE)(?: [A-Z]+)?)")

_HANDED = re.compile(r"OWNER TO|REASSIGN OWNED|(make|makes) a superuser (its|their) owner|SET ROLE")
HANDED = {
    ("ingestd/postgres/wal/publication/unmanaged.py", "ALTER PUBLICATION {} OWNER TO {};"): (
        "to this role, which is no superuser; a publication has no code"
    ),
    ("ingestd/postgres/catalog/trusted_columns.py", "ALTER TYPE {} OWNER TO postgres;"): (
        "a type has no body; functions, casts and checks keep their owners, who are checked"
    ),
}
"""Texts that pass an object to another role, and why they may."""


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def unquoted(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and expression of what texts with a statement contain unquoted."""
    if _STATEMENT.search(source) is None:
        return
    tree = parsed(source)
    for scope in [tree, *(n for n in nodes(source) if isinstance(n, _FUNCTIONS))]:
        quoted = set() if scope is tree else _quoted_names(scope)
        inner = [n for n in ast.walk(scope) if n is not scope and isinstance(n, _FUNCTIONS)]
        run = {id(n) for each in inner for n in ast.walk(each)}
        for text in ast.walk(scope):
            if isinstance(text, ast.JoinedStr) and id(text) not in run and _is_sql(text):
                for part in text.values:
                    if isinstance(part, ast.FormattedValue) and not _is_quoted(part.value, quoted):
                        yield part.lineno, ast.unparse(part.value)


def _is_sql(text: ast.JoinedStr) -> bool:
    parts = (p.value if isinstance(p, ast.Constant) else "" for p in text.values)
    return _STATEMENT.search("".join(map(str, parts))) is not None


def _is_quoted(value: ast.expr, quoted: set[str]) -> bool:  # noqa: PLR0911 - a table
    match value:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return name in quoted or name.isupper()
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in QUOTING:
            return True
        case ast.Call(func=ast.Attribute(attr="join"), args=[joined]):
            return _is_quoted(joined, quoted)
        case ast.Call(func=ast.Name(id="map"), args=[function, _]):
            return ast.unparse(function) in QUOTING
        case ast.GeneratorExp(elt=each) | ast.ListComp(elt=each):
            return _is_quoted(each, quoted)
        case ast.BoolOp(values=values):
            return all(_is_quoted(v, quoted) for v in values)
        case ast.IfExp(body=first, orelse=other):
            return _is_quoted(first, quoted) and _is_quoted(other, quoted)
        case ast.JoinedStr(values=values):
            parts = [p.value for p in values if isinstance(p, ast.FormattedValue)]
            return all(_is_quoted(p, quoted) for p in parts)
    return False


def _quoted_names(scope: ast.AST) -> set[str]:
    """Return the names that are assigned nothing but quoted texts."""
    assigned: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            assigned += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            assigned.append((node.target, node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            assigned.append((node.target, node.iter))
    pairs = []
    for target, value in assigned:
        if not isinstance(target, ast.Tuple):
            pairs.append((target, value))
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            pairs += zip(target.elts, value.elts, strict=True)
        else:
            pairs += [(each, value) for each in target.elts]
    found: set[str] = set()
    while True:  # names that are assigned from others
        names = {t.id for t, _ in pairs if isinstance(t, ast.Name)}
        bad = {t.id for t, v in pairs if isinstance(t, ast.Name) and not _is_quoted(v, found)}
        if names - bad == found:
            return found
        found = names - bad


def test_names_in_remedies_are_quoted() -> None:
    found = {
        (name_of(path), expression): line
        for path in modules("ingestd", "spark_jobs")
        if name_of(path) != RUN_BY_SPARK
        for line, expression in unquoted(text_of(path))
    }
    assert [(*key, line) for key, line in found.items() if key not in MEANT] == []
    assert found.keys() == MEANT.keys()


def test_names_quoted_by_the_server_are_printable() -> None:
    found = {
        (name_of(path), statement)
        for path in modules("ingestd")
        for statement in _BY_SERVER.findall(text_of(path))
    }
    assert found == BY_SERVER.keys()


@pytest.mark.parametrize(
    ("text", "is_safe"),
    [
        ('remedy = f"DROP INDEX {name};"', False),
        ('remedy = f"DROP INDEX {name!r};"', False),
        ('x = f"{name}"; remedy = f"DROP INDEX {x};"', False),
        ('x = qualified(name); x = name; remedy = f"DROP INDEX {x};"', False),
        ('remedy = f"ALTER FUNCTION {row.name} SET x"', False),
        ('remedy = " or ".join(f"DROP INDEX {n};" for n in names)', False),
        ("remedy = f\"DROP INDEX {', '.join(names)};\"", False),
        ('remedy = f"DROP INDEX {qualified(name)};"', True),
        ('x = printed(name); remedy = f"DROP INDEX {x};"', True),
        ('x, y = (printed(n) for n in names); remedy = f"DROP INDEX {x}.{y};"', True),
        ("remedy = f\"DROP INDEX {', '.join(map(printable_sql, names))};\"", True),
        ('what = f"index {name} differs"', True),
    ],
)
def test_the_guard_of_names_finds(text: str, *, is_safe: bool) -> None:
    body = text.replace("; ", "\n    ")
    assert (not list(unquoted(f"def f(name, names, row):\n    {body}\n"))) == is_safe


def test_no_remedy_makes_code_a_superusers() -> None:
    """ALTER ... OWNER TO keeps the body that the former owner wrote."""
    found = {
        (name_of(path), node.value)
        for path in modules("ingestd", "spark_jobs")
        for node in nodes(text_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if _HANDED.search(node.value) is not None
    }
    assert found == HANDED.keys()
    for path in [*(ROOT / "deploy").rglob("*.sql"), *(ROOT / "ingestd").rglob("*.sql")]:
        assert _HANDED.search(path.read_text("utf-8")) is None, path
