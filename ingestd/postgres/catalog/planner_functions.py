"""Detection of tables whose owners' functions run when a query on them is planned.

Before the planner uses the expressions of a table's indexes, extended statistics and partition key,
it simplifies them: it calls immutable functions with constant arguments, and inlines SQL functions.
It does so for every query on the table, with the privileges of the role whose query it plans. So a
table is read only if every function that its expressions call in this way is owned by a superuser
or by this role. (CHECK constraints are not simplified: `constraint_exclusion` is off.)

A call is harmless if the planner can't simplify it: it is not an SQL function that could be
inlined, and an argument is not constant. Operators owned by other roles are never harmless: row
estimates call them with values of the table's statistics.

The owner may add an index after this check: CREATE INDEX does not wait for readers.

Source: PostgreSQL, src/backend/optimizer/util/plancat.c (get_relation_info), clauses.c
(evaluate_function, inline_function), src/backend/utils/cache/relcache.c
(RelationGetIndexExpressions).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.user_types import FIRST_USER_OID

_EXPRESSIONS = """
WITH RECURSIVE tree AS (
  SELECT %(oid)s::oid AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
   WHERE %(with_partitions)s)
SELECT pg_catalog.format('DROP INDEX %%s;', i.indexrelid::pg_catalog.regclass),
       pg_catalog.concat(i.indexprs::text, i.indpred::text)
  FROM tree JOIN pg_catalog.pg_index i ON i.indrelid = tree.oid
 WHERE i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
UNION ALL
SELECT pg_catalog.format('DROP STATISTICS %%I.%%I;', n.nspname, s.stxname), s.stxexprs::text
  FROM tree JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = tree.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = s.stxnamespace WHERE s.stxexprs IS NOT NULL
UNION ALL
SELECT NULL, p.partexprs::text
  FROM tree JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = tree.oid
 WHERE p.partexprs IS NOT NULL
"""
_FUNCTIONS = """
SELECT p.oid::int8, p.oid::pg_catalog.regprocedure::text,
       l.lanname = 'sql' AND NOT p.prosecdef AND p.proconfig IS NULL
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = p.proowner
 WHERE p.oid = ANY(%s::oid[])
   AND NOT coalesce(r.rolsuper OR r.rolname = current_user, false)
"""
_TOKEN = re.compile(r"[(){}]|\[[^]]*\]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_CALLED = ("funcid", "opfuncid", "hashfuncid", "negfuncid")
_TRANSPARENT = {"RELABELTYPE", "COLLATEEXPR", "COERCEVIAIO"}


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of an expression, in the format of pg_node_tree."""

    kind: str
    fields: Mapping[str, Sequence[_Node | str]]

    def number(self, field: str) -> int:
        """Return a numeric field; 0 if missing."""
        text = next(iter(self.fields.get(field, ())), "")
        return int(text) if isinstance(text, str) and text.isdecimal() else 0

    def below(self) -> Iterator[_Node]:
        """Yield this node and all below it."""
        yield self
        for value in self.fields.values():
            for item in value:
                if isinstance(item, _Node):
                    yield from item.below()

    def nodes(self, field: str) -> list[_Node]:
        """Return the nodes in a field."""
        return [item for item in self.fields.get(field, ()) if isinstance(item, _Node)]

    def functions(self) -> Iterator[int]:
        """Yield the OIDs of the user-defined functions that this node itself calls."""
        numbers = map(self.number, _CALLED)
        yield from (oid for oid in numbers if oid >= FIRST_USER_OID)

    @property
    def varies(self) -> bool:
        """Return whether it certainly can't be simplified to a constant."""
        if self.kind == "VAR":
            return True
        if self.kind in _TRANSPARENT:
            return any(arg.varies for arg in self.nodes("arg"))
        if self.kind not in {"FUNCEXPR", "OPEXPR"}:
            return False
        args = self.nodes("args")
        return any(a.varies for a in args) and all(a.varies or a.is_value for a in args)

    @property
    def is_value(self) -> bool:
        """Return whether it is a constant other than null, for which calls may be skipped."""
        return self.kind == "CONST" and list(self.fields.get("constisnull", ())) == ["false"]


async def ensure_plannable(
    connection: AsyncConnection[Any], table: TableId, oid: int, *, with_partitions: bool
) -> None:
    """Raise TableError if planning a query on a relation could run another role's function.

    Raises psycopg.Error.
    """
    of = {"oid": oid, "with_partitions": with_partitions}
    found = await (await connection.execute(_EXPRESSIONS, of)).fetchall()
    trees = [(drop, list(_parsed(text))) for drop, text in found]
    nodes = [(drop, node) for drop, tree in trees for top in tree for node in top.below()]
    called = {function for _, node in nodes for function in node.functions()}
    if not called:
        return
    rows = await (await connection.execute(_FUNCTIONS, (sorted(called),))).fetchall()
    others = {function: (name, is_sql) for function, name, is_sql in rows}
    for drop, node in nodes:
        for function in node.functions():
            if function not in others:
                continue
            name, is_sql = others[function]
            if node.kind == "FUNCEXPR" and node.varies and not is_sql:
                continue
            raise TableError(table, _WHAT.format(name), remedy=_remedy(drop, name, is_sql=is_sql))


_WHAT = (
    "it is not read: for an expression of its indexes, statistics or partition key the server "
    "would call {}, owned by neither a superuser nor this role, with this role's privileges"
)


def _remedy(drop: str | None, function: str, *, is_sql: bool) -> str:
    ways = []
    if is_sql:
        ways.append(f"ALTER FUNCTION {function} SET search_path FROM CURRENT;  -- so not inlined")
    if drop is not None:
        ways.append(drop)
    return "  or: ".join([*ways, "review the function and make a superuser its owner"])


def _parsed(text: str) -> Iterator[_Node]:
    """Yield the top-level nodes of a pg_node_tree, or of several in sequence."""
    tokens = iter(_TOKEN.findall(text))
    for token in tokens:
        if token == "{":  # noqa: S105 - a brace
            yield _node(tokens)


def _node(tokens: Iterator[str]) -> _Node:
    kind = next(tokens)
    fields: dict[str, list[_Node | str]] = {}
    values: list[_Node | str] = []
    for token in tokens:
        if token == "}":  # noqa: S105 - a brace
            break
        if token == "{":  # noqa: S105 - a brace
            values.append(_node(tokens))
        elif token.startswith(":"):
            values = fields.setdefault(token[1:], [])
        elif token not in {"(", ")"}:
            values.append(token)
    return _Node(kind, fields)
