"""The script that creates the event triggers (`ddl_log.sql`), and a check that it was run."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, LiteralString

from psycopg import AsyncConnection

from ingestd.model.printable_text import printable_sql
from ingestd.postgres.rewrites.ddl_log import VERSION

SCHEMA = "ingestd_ddl"
REMEDY = (
    "as a role that may create event triggers (a superuser), run deploy/ddl_log.sql in this"
    " database; `ingestd check` prints it"
)
_FUNCTION = re.compile(
    r"^CREATE OR REPLACE FUNCTION ingestd_ddl\.(\w+)\(\).*?AS \$ingestd\$(.*?)\$ingestd\$;$",
    re.DOTALL | re.MULTILINE,
)
_EVENTS = {
    "command_end": "ddl_command_end",
    "dropped": "sql_drop",
    "rewritten": "table_rewrite",
}
# Not ALTER FUNCTION ... OWNER TO: what that role wrote would run as the new owner. Event triggers
# first: their functions run in the DDL of a superuser, except in that of event triggers.
_DROP = (
    " ".join(f"DROP EVENT TRIGGER IF EXISTS {SCHEMA}_{name};" for name in _EVENTS)
    + f" DROP SCHEMA {SCHEMA} CASCADE;  -- and then, {REMEDY}"
)
_TAGS = re.compile(
    r"^CREATE EVENT TRIGGER ingestd_ddl_(\w+) ON \w+\s+WHEN TAG IN \((.*?)\)",
    re.DOTALL | re.MULTILINE,
)
_TRIGGERS = """
SELECT t.evtname::text, t.evtevent::text, t.evtenabled::text, n.nspname::text, p.proname::text,
       t.evttags::text[]
  FROM pg_catalog.pg_event_trigger t
  JOIN pg_catalog.pg_proc p ON p.oid = t.evtfoid
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
 WHERE t.evtname LIKE 'ingestd\\_ddl\\_%%'
"""
_FUNCTIONS = """
SELECT p.proname::text, pg_catalog."left"(p.prosrc, 65536), p.prosecdef, p.proconfig::text,
       l.lanname::text, p.provolatile::text
  FROM pg_catalog.pg_proc p
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %s
  JOIN pg_catalog.pg_language l ON l.oid = p.prolang
 WHERE p.pronargs = 0
"""
# Event triggers belong to superusers, or to the administrator role of a managed service.
_OTHERS = """
WITH made AS (
  SELECT 'SCHEMA ' || pg_catalog.quote_ident(n.nspname) AS what, n.nspowner AS owner
    FROM pg_catalog.pg_namespace n WHERE n.nspname = %(schema)s
   UNION ALL
  SELECT 'FUNCTION ' || p.oid::pg_catalog.regprocedure::pg_catalog.text, p.proowner
    FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %(schema)s
   WHERE p.proname::pg_catalog.text = ANY(%(functions)s) AND p.pronargs = 0
), maker AS (
  SELECT t.evtowner AS owner FROM pg_catalog.pg_event_trigger t
   WHERE t.evtname LIKE 'ingestd\\_ddl\\_%%')
SELECT m.what, r.rolname::pg_catalog.text
  FROM made m JOIN pg_catalog.pg_roles r ON r.oid = m.owner AND NOT r.rolsuper
 WHERE m.owner NOT IN (SELECT owner FROM maker) AND EXISTS (SELECT FROM maker)
 ORDER BY 1
"""
_VERSION = """
SELECT pg_catalog."left"(pg_catalog.obj_description(n.oid, 'pg_namespace'), 8192)
  FROM pg_catalog.pg_namespace n WHERE n.nspname = %s
"""
_UNWATCHED = """
WITH RECURSIVE tree(oid, is_root) AS (
  SELECT c.oid, true FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[]) AND c.relkind = 'p'
  UNION ALL
  SELECT i.inhrelid, false FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT n.nspname::text || '.' || c.relname::text
  FROM tree t
  JOIN pg_catalog.pg_class c ON c.oid = t.oid AND (t.is_root OR c.relkind = 'r')
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE (SELECT count(*) FROM pg_catalog.pg_trigger g
          JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid AND p.proname = 'truncating'
          JOIN pg_catalog.pg_namespace f ON f.oid = p.pronamespace AND f.nspname = %s
         WHERE g.tgrelid = c.oid AND g.tgenabled = 'A' AND g.tgqual IS NULL
           AND g.tgtype = CASE g.tgname WHEN 'ingestd_ddl_truncate' THEN 34
                                        WHEN 'ingestd_ddl_truncated' THEN 32 END
       ) < CASE WHEN t.is_root THEN 2 ELSE 1 END
 ORDER BY 1
"""
_MAY_NOT_WRITE = """
SELECT p.oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc p
 WHERE p.proname = 'pg_logical_emit_message'
   AND p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
   AND NOT pg_catalog.has_function_privilege('public', p.oid, 'EXECUTE')
"""
# Not SECURITY DEFINER, with this search_path, in this language and volatile.
_MADE = [False, '{"search_path=pg_catalog, pg_temp"}', "plpgsql", "v"]
_NAMED = 3


@cache
def script() -> str:
    """Return the SQL."""
    return resources.files(__package__).joinpath("ddl_log.sql").read_text("utf-8")


@cache
def bodies() -> dict[str, str]:
    """Return the body of each of its functions, as in pg_proc.prosrc."""
    return dict(_FUNCTION.findall(script()))


@cache
def tags() -> dict[str, list[str]]:
    """Return the command tags of each event trigger that has a filter, by its function."""
    return {name: re.findall(r"'(.*?)'", listed) for name, listed in _TAGS.findall(script())}


@dataclass(frozen=True, slots=True)
class DdlLogFault:
    """A missing or altered object, because of which only catalog polls count."""

    what: str
    remedy: str = REMEDY


async def ddl_log_fault(
    connection: AsyncConnection[Any], tables: Collection[int]
) -> DdlLogFault | None:
    """Return what the script's objects lack for these tables; None if all are in place."""
    comment = next((row[0] for row in await _of(connection, _VERSION, SCHEMA)), None)
    parameters = {"schema": SCHEMA, "functions": list(bodies())}
    others = await (await connection.execute(_OTHERS, parameters)).fetchall()
    return (
        _of_owners(others)
        or _of_functions(await _of(connection, _FUNCTIONS, SCHEMA), comment or "")
        or _of_triggers(await _of(connection, _TRIGGERS))
        or _of_rights([name for (name,) in await _of(connection, _MAY_NOT_WRITE)])
        or _of_tables([name for (name,) in await _of(connection, _UNWATCHED, list(tables), SCHEMA)])
    )


def _of_owners(rows: list[tuple[Any, ...]]) -> DdlLogFault | None:
    """Return a fault for a less trusted owner, whose code would run in the DDL of all roles."""
    if not rows:
        return None
    what, owner = rows[0]
    kind, _, name = what.partition(" ")
    return DdlLogFault(
        f"{kind.lower()} {name} belongs to role {owner!r}, which may alter what runs in the DDL of "
        "all roles and is neither a superuser nor the owner of the event triggers",
        _DROP,
    )


def _of_functions(rows: list[tuple[Any, ...]], comment: str) -> DdlLogFault | None:
    found = {name: rest for name, *rest in rows}
    expected = bodies()
    version = re.fullmatch(r"ingestd ddl_log version (\d{1,9})", comment)
    if found.keys().isdisjoint(expected):
        return DdlLogFault("its event triggers are missing")
    if version is not None and int(version[1]) < VERSION:
        return DdlLogFault(f"its script is version {version[1]}, and this daemon's is {VERSION}")
    if version is not None and int(version[1]) > VERSION:
        what = f"its script is version {version[1]}, newer than this daemon's, {VERSION}"
        return DdlLogFault(what, "run a newer ingestd, or the script that this version prints")
    for name, body in expected.items():
        if name not in found:
            return DdlLogFault(f"function {SCHEMA}.{name}() is missing")
        if found[name] != [body, *_MADE]:
            return DdlLogFault(f"function {SCHEMA}.{name}() was altered")
    return None


def _of_rights(functions: list[str]) -> DdlLogFault | None:
    if not functions:
        return None
    names = map(printable_sql, functions)
    remedy = " ".join(f"GRANT EXECUTE ON FUNCTION {name} TO PUBLIC;" for name in names)
    return DdlLogFault("not every role may execute pg_logical_emit_message", remedy)


def _of_triggers(rows: list[tuple[Any, ...]]) -> DdlLogFault | None:
    found = {name: row for name, *row in rows}
    for function, event in _EVENTS.items():
        name = f"{SCHEMA}_{function}"
        if name not in found:
            return DdlLogFault(f"event trigger {name} is missing")
        at, enabled, schema, called, commands = found[name]
        is_for = sorted(commands or []) == sorted(tags().get(function, []))
        if (at, schema, called) != (event, SCHEMA, function) or not is_for:
            return DdlLogFault(f"event trigger {name} was altered")
        if enabled != "A":
            what = f"event trigger {name} is disabled, completely or for some sessions"
            return DdlLogFault(what, f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS;")
    return None


def _of_tables(names: list[str]) -> DdlLogFault | None:
    if not names:
        return None
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    listed = ", ".join(names[:_NAMED]) + others
    return DdlLogFault(f"its triggers for TRUNCATE are missing or disabled on {listed}")


async def _of(
    connection: AsyncConnection[Any], query: LiteralString, *values: object
) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values)).fetchall()
