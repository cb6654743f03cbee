"""Detection of tables whose owners' code runs when a query on them is planned.

Before the planner uses the expressions of a table's indexes, extended statistics and partition key,
and those of the partition keys above a partitioned table that is itself a partition, it simplifies
them: it calls immutable functions with constant arguments, inlines SQL functions, and simplifies
the checks of the domains that they cast to, which calls functions in the same way. It does so for
every query on the table, with the privileges of the role whose query it plans. So a table is read
only if all that its expressions call in this way, and these domains with the functions of their
checks, are owned by a superuser or by this role. (CHECK constraints are not simplified, nor are the
keys above a partition without partitions: `constraint_exclusion` is off.)

A call is harmless if the planner can't simplify it: it is not an SQL function that could be
inlined, and an argument is not constant. Operators owned by other roles are never harmless: row
estimates call them with values of the table's statistics. Nor is a node of a kind that is not known
here, if it refers to anything user-defined.

The owner may add an index after this check: CREATE INDEX does not wait for readers.

Source: PostgreSQL, src/backend/optimizer/util/plancat.c (get_relation_info,
set_baserel_partition_constraint), clauses.c (evaluate_function, inline_function,
eval_const_expressions_mutator), src/backend/utils/cache/relcache.c (RelationGetIndexExpressions),
typcache.c (load_domaintype_info), src/include/nodes/primnodes.h.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import TableError, TableReplacedError
from ingestd.model.printable_text import printable_sql
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.bounded_text import at_most
from ingestd.postgres.catalog.trusted_types import EACH_TRUSTED_PART, is_trusted, is_type_trusted
from ingestd.postgres.catalog.user_types import FIRST_USER_OID

MOST_EXPRESSIONS = 4 << 20
"""Limit for all of a table's expressions as the catalog stores them, in bytes."""
_SMALL = 1 << 16
_OVERHEAD = 256
"""Of each expression, besides its text."""
# `above`: the function sees the present, the catalog's tables the transaction's snapshot. What they
# contain of a detached partition differs, too.
_EXPRESSIONS = f"""
WITH RECURSIVE tree AS (
  SELECT %(oid)s::oid AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
   WHERE %(with_partitions)s),
above AS (
  SELECT c.oid FROM pg_catalog.pg_class c WHERE c.oid = %(oid)s AND c.relkind = 'p'
  UNION
  SELECT x.oid FROM above CROSS JOIN LATERAL (
    SELECT i.inhparent FROM pg_catalog.pg_inherits i WHERE i.inhrelid = above.oid UNION ALL
    SELECT p.relid::oid FROM pg_catalog.pg_partition_ancestors(above.oid::pg_catalog.regclass) p
    ) AS x(oid)),
found (drop, expression) AS (
  SELECT pg_catalog.format('DROP INDEX %%s;', i.indexrelid::pg_catalog.regclass), e.expression
    FROM tree JOIN pg_catalog.pg_index i ON i.indrelid = tree.oid
   CROSS JOIN LATERAL (VALUES (i.indexprs::text), (i.indpred::text)) e(expression)
   WHERE e.expression IS NOT NULL
  UNION ALL
  SELECT pg_catalog.format('DROP STATISTICS %%I.%%I;', n.nspname, s.stxname), s.stxexprs::text
    FROM tree JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = tree.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = s.stxnamespace WHERE s.stxexprs IS NOT NULL
  UNION ALL
  SELECT NULL, p.partexprs::text
    FROM tree JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = tree.oid
   WHERE p.partexprs IS NOT NULL
  UNION ALL
  SELECT pg_catalog.format('ALTER TABLE %%s DETACH PARTITION %%s;',
           i.inhparent::pg_catalog.regclass, i.inhrelid::pg_catalog.regclass), p.partexprs::text
    FROM above JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = above.oid
    JOIN pg_catalog.pg_inherits i ON i.inhrelid = %(oid)s
   WHERE above.oid <> %(oid)s AND p.partexprs IS NOT NULL),
sized AS (
  SELECT drop, expression, pg_catalog.octet_length(expression) + {_OVERHEAD} AS size FROM found),
summed AS (
  SELECT drop, expression, size, pg_catalog.sum(size) OVER (ORDER BY size, drop) AS total
    FROM sized)
SELECT drop, {at_most(MOST_EXPRESSIONS, "expression", total="total")}, true
  FROM summed WHERE total - size <= {MOST_EXPRESSIONS}
UNION ALL
SELECT NULL, NULL, false FROM above
 WHERE oid NOT IN (SELECT partrelid FROM pg_catalog.pg_partitioned_table)
"""  # noqa: S608 - constants
# A domain also checks what the domains below it demand, and those that its checks cast to.
_OTHERS = f"""
WITH RECURSIVE domains AS (
  SELECT o AS cast_to, o AS oid FROM unnest(%(domains)s::oid[]) o
  UNION
  SELECT d.cast_to, x.oid FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid
{EACH_TRUSTED_PART})
SELECT false, p.oid::int8, p.oid::pg_catalog.regprocedure::text,
       l.lanname = 'sql' AND NOT p.prosecdef AND p.proconfig IS NULL
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
 WHERE p.oid = ANY(%(functions)s::oid[]) AND NOT {is_trusted("p.proowner")}
UNION ALL
SELECT true, d.cast_to::int8, pg_catalog.min(t.oid::pg_catalog.regtype::text), false
  FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype = 'd'
 WHERE t.oid >= {FIRST_USER_OID} AND NOT {is_type_trusted("t")}
 GROUP BY d.cast_to
"""  # noqa: S608 - constants
_OID = re.compile(r"\d{1,10}", re.ASCII)
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
    """What a node of an expression may run. `drop`: the statement that removes the expression.

    `functions`: the OIDs of the user-defined functions that it calls itself. `domain`: the OID of
    the user-defined domain whose checks it makes, 0 if none. `may_run_code`: it is of an unknown
    kind, and refers to user-defined objects. `varies`: it certainly can't be simplified to a
    constant. `is_value`: a constant other than null, for which calls may be skipped.
    """

    drop: str | None
    kind: str
    functions: tuple[int, ...]
    domain: int
    may_run_code: bool
    varies: bool
    is_value: bool

    @property
    def matters(self) -> bool:
        """Return whether it may run anything user-defined."""
        return self.may_run_code or bool(self.functions or self.domain)


@dataclass(slots=True)
class _OpenNode:
    """A node whose end has not been read. `values`: those of the field that is being read."""

    kind: str = ""
    fields: dict[str, list[_Node | str]] = field(default_factory=dict)
    values: list[_Node | str] = field(default_factory=list)

    def add(self, token: str) -> None:
        """Add the token after the others."""
        if not self.kind:
            self.kind = token
        elif token.startswith(":"):
            self.values = self.fields.setdefault(token[1:], [])
        elif token not in {"(", ")"}:
            self.values.append(token)

    def closed(self, drop: str | None) -> _Node:
        """Return the complete node."""
        called = tuple(n for n in map(self._number, _CALLED) if n >= FIRST_USER_OID)
        domain = self._number("resulttype") if self.kind == _DOMAIN else 0
        is_user_defined = domain >= FIRST_USER_OID
        is_value = self.kind == "CONST" and self.fields.get("constisnull") == ["false"]
        return _Node(
            drop,
            self.kind,
            called,
            domain if is_user_defined else 0,
            self._may_run_code(),
            self._varies(),
            is_value,
        )

    def _number(self, name: str) -> int:
        text = next(iter(self.fields.get(name, ())), "")
        return int(text) if isinstance(text, str) and _OID.fullmatch(text) else 0

    def _nodes(self, name: str) -> list[_Node]:
        return [item for item in self.fields.get(name, ()) if isinstance(item, _Node)]

    def _may_run_code(self) -> bool:
        if self.kind in _HARMLESS or self.kind == _DOMAIN:
            return False
        items = (item for value in self.fields.values() for item in value)
        return any(
            isinstance(item, str) and _OID.fullmatch(item) and int(item) >= FIRST_USER_OID
            for item in items
        )

    def _varies(self) -> bool:
        if self.kind == "VAR":
            return True
        if self.kind in _TRANSPARENT:
            return any(arg.varies for arg in self._nodes("arg"))
        if self.kind not in {"FUNCEXPR", "OPEXPR"}:
            return False
        args = self._nodes("args")
        return any(a.varies for a in args) and all(a.varies or a.is_value for a in args)


async def ensure_plannable(
    connection: AsyncConnection[Any], table: TableId, oid: int, *, with_partitions: bool
) -> None:
    """Raise TableError if planning a query on a relation could run another role's function.

    Raises psycopg.Error; TableReplacedError if the transaction's snapshot does not see its parents.
    """
    nodes = await _read_nodes(connection, table, oid, with_partitions=with_partitions)
    for node in nodes:
        if node.may_run_code:
            raise _refusal(table, node.drop, f"what a node {node.kind} refers to,", "what it uses")
    functions = {function for node in nodes for function in node.functions}
    domains = {node.domain for node in nodes if node.domain}
    if not functions and not domains:
        return
    asked = {"functions": sorted(functions), "domains": sorted(domains)}
    rows = await (await connection.execute(_OTHERS, asked)).fetchall()
    others = {(is_domain, called): (name, is_sql) for is_domain, called, name, is_sql in rows}
    for node in nodes:
        drop = node.drop
        if (True, node.domain) in others:
            name, _ = others[True, node.domain]
            checks = f"the checks of the domain {name}, or their functions,"
            raise _refusal(table, drop, checks, "the domain, the functions of its checks")
        for function in node.functions:
            if (False, function) not in others:
                continue
            name, is_sql = others[False, function]
            if node.kind == "FUNCEXPR" and node.varies and not is_sql:
                continue
            raise _refusal(
                table, drop, f"{name},", "the function", inlined=name if is_sql else None
            )


async def _read_nodes(
    connection: AsyncConnection[Any], table: TableId, oid: int, *, with_partitions: bool
) -> list[_Node]:
    of = {"oid": oid, "with_partitions": with_partitions}
    found = await (await connection.execute(_EXPRESSIONS, of)).fetchall()
    if not all(is_seen for _, _, is_seen in found):
        raise TableReplacedError(table, "became a partition while it was read")
    for drop, text, _ in found:
        if text is None:
            raise _too_large(table, drop)
    texts = [(drop, text) for drop, text, _ in found]
    if sum(len(text) for _, text in texts) <= _SMALL:
        return _relevant(texts)
    return await asyncio.to_thread(_relevant, texts)  # it takes about a second for 4 MB


def _refusal(
    table: TableId, drop: str | None, called: str, owned: str, *, inlined: str | None = None
) -> TableError:
    what = (
        "it is not read: for an expression of its indexes, statistics or partition key, or a"
        f" parent's key, the server would call {called} owned by neither a superuser nor this"
        " role, with this role's privileges"
    )
    ways = []
    if inlined is not None:
        name = printable_sql(inlined)
        ways.append(f"ALTER FUNCTION {name} SET search_path FROM CURRENT;  -- so not inlined")
    if drop is not None:
        ways.append(printable_sql(drop))
    # Not a change of its owner: its body could run with a superuser's privileges from then on.
    copied = f"review {owned} and all that is called there, and use a copy by a superuser instead"
    remedy = "  or: ".join([*ways, copied])
    return TableError(table, what, remedy=remedy)


def _too_large(table: TableId, drop: str | None) -> TableError:
    most = f"{MOST_EXPRESSIONS >> 20} MB"
    return TableError(
        table,
        "it is not read: the expressions of its indexes, statistics and partition key are stored in"
        f" more than {most}, which is too much to find out which functions the server would call",
        remedy=drop or "create it again with a smaller partition key",
    )


def _relevant(names: Iterable[tuple[str | None, str]]) -> list[_Node]:
    """Return the nodes of all these expressions that may run something, each once."""
    nodes = (node for drop, text in names for node in _parsed(drop, text) if node.matters)
    return list(dict.fromkeys(nodes))


def _parsed(drop: str | None, text: str) -> Iterator[_Node]:
    """Yield the nodes of a pg_node_tree, or of several in sequence: each after those below it.

    Without recursion: their depth is limited by the owner's server only.
    """
    path: list[_OpenNode] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "{":  # noqa: S105 - a brace
            path.append(_OpenNode())
        elif path and token == "}":  # noqa: S105 - a brace
            node = path.pop().closed(drop)
            yield node
            if path:
                path[-1].values.append(node)
        elif path:
            path[-1].add(token)
