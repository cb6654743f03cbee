"""Detection of tables whose owners' code runs when a query on them is planned.

Before the planner uses the expressions of a table's indexes, extended statistics and partition key,
it simplifies them: it calls immutable functions with constant arguments, inlines SQL functions, and
simplifies the checks of the domains that they cast to, which calls functions in the same way. It
does so for every query on the table, with the privileges of the role whose query it plans. So a
table is read only if all that its expressions call in this way, and these domains, are owned by a
superuser or by this role. (CHECK constraints are not simplified: `constraint_exclusion` is off.)

A call is harmless if the planner can't simplify it: it is not an SQL function that could be
inlined, and an argument is not constant. Operators owned by other roles are never harmless: row
estimates call them with values of the table's statistics. Nor is a node of a kind that is not known
here, if it refers to anything user-defined.

The owner may add an index after this check: CREATE INDEX does not wait for readers.

Source: PostgreSQL, src/backend/optimizer/util/plancat.c (get_relation_info), clauses.c
(evaluate_function, inline_function, eval_const_expressions_mutator), src/backend/utils/cache/
relcache.c (RelationGetIndexExpressions), typcache.c (load_domaintype_info), src/include/nodes/
primnodes.h.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.printable_text import printable_sql
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.user_types import FIRST_USER_OID, is_trusted

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
# A domain also checks what the domains below it demand.
_OTHERS = f"""
WITH RECURSIVE domains AS (
  SELECT o AS cast_to, o AS oid FROM unnest(%(domains)s::oid[]) o
  UNION
  SELECT d.cast_to, t.typbasetype FROM domains d
    JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype = 'd')
SELECT false, p.oid::int8, p.oid::pg_catalog.regprocedure::text,
       l.lanname = 'sql' AND NOT p.prosecdef AND p.proconfig IS NULL
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
 WHERE p.oid = ANY(%(functions)s::oid[]) AND NOT {is_trusted("p.proowner")}
UNION ALL
SELECT true, d.cast_to::int8, t.oid::pg_catalog.regtype::text, false
  FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype = 'd'
 WHERE t.oid >= {FIRST_USER_OID} AND NOT {is_trusted("t.typowner")}
"""  # noqa: S608 - constants
_TOKEN = re.compile(r"[(){}]|\[[^]]*\]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_CALLED = ("funcid", "opfuncid", "hashfuncid", "negfuncid")
_TRANSPARENT = {"RELABELTYPE", "COLLATEEXPR", "COERCEVIAIO"}
_DOMAIN = "COERCETODOMAIN"
_HARMLESS = _TRANSPARENT | {
    # These call what `_CALLED` names.
    "DISTINCTEXPR",
    "FUNCEXPR",
    "NULLIFEXPR",
    "OPEXPR",
    "SCALARARRAYOPEXPR",
    # The conversion of the elements is a node below.
    "ARRAYCOERCEEXPR",
    # These call nothing, or the operators of a class, which only superusers can create.
    "ARRAY",
    "ARRAYEXPR",
    "BOOLEANTEST",
    "BOOLEXPR",
    "CASE",
    "CASEEXPR",
    "CASETESTEXPR",
    "CASEWHEN",
    "COALESCE",
    "COALESCEEXPR",
    "CONST",
    "CONVERTROWTYPEEXPR",
    "FIELDSELECT",
    "MINMAX",
    "MINMAXEXPR",
    "NULLTEST",
    "ROW",
    "ROWCOMPARE",
    "ROWCOMPAREEXPR",
    "ROWEXPR",
    "SUBSCRIPTINGREF",
    "VAR",
    "WHEN",
}
"""The kinds of nodes that run nothing else at planning, by their names in all versions."""


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
    def domain(self) -> int:
        """The OID of the user-defined domain whose checks it makes; 0 if it makes none."""
        oid = self.number("resulttype") if self.kind == _DOMAIN else 0
        return oid if oid >= FIRST_USER_OID else 0

    @property
    def may_run_code(self) -> bool:
        """Return whether it is of an unknown kind, and refers to user-defined objects."""
        if self.kind in _HARMLESS or self.kind == _DOMAIN:
            return False
        items = (item for value in self.fields.values() for item in value)
        return any(
            isinstance(item, str) and item.isdecimal() and int(item) >= FIRST_USER_OID
            for item in items
        )

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
    for drop, node in nodes:
        if node.may_run_code:
            raise _refusal(table, drop, f"what a node {node.kind} refers to", "what it uses")
    functions = {function for _, node in nodes for function in node.functions()}
    domains = {node.domain for _, node in nodes if node.domain}
    if not functions and not domains:
        return
    asked = {"functions": sorted(functions), "domains": sorted(domains)}
    rows = await (await connection.execute(_OTHERS, asked)).fetchall()
    others = {(is_domain, called): (name, is_sql) for is_domain, called, name, is_sql in rows}
    for drop, node in nodes:
        if (True, node.domain) in others:
            name, _ = others[True, node.domain]
            raise _refusal(table, drop, f"the checks of the domain {name}", "the domain")
        for function in node.functions():
            if (False, function) not in others:
                continue
            name, is_sql = others[False, function]
            if node.kind == "FUNCEXPR" and node.varies and not is_sql:
                continue
            raise _refusal(table, drop, name, "the function", inlined=name if is_sql else None)


def _refusal(
    table: TableId, drop: str | None, called: str, owned: str, *, inlined: str | None = None
) -> TableError:
    what = (
        "it is not read: for an expression of its indexes, statistics or partition key the server"
        f" would call {called}, owned by neither a superuser nor this role, with this role's"
        " privileges"
    )
    ways = []
    if inlined is not None:
        name = printable_sql(inlined)
        ways.append(f"ALTER FUNCTION {name} SET search_path FROM CURRENT;  -- so not inlined")
    if drop is not None:
        ways.append(printable_sql(drop))
    # Not a change of its owner: its body could run with a superuser's privileges from then on.
    copied = f"review {owned}, and use a copy in its place that a superuser has created"
    remedy = "  or: ".join([*ways, copied])
    return TableError(table, what, remedy=remedy)


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
