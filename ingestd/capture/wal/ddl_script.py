"""The script that makes the event triggers (`ddl_log.sql`), and what a database lacks of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, LiteralString

from psycopg import AsyncConnection

from ingestd.capture.wal.ddl_log import VERSION

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
_TRIGGERS = """
SELECT t.evtname::text, t.evtevent::text, t.evtenabled::text, n.nspname::text, p.proname::text
  FROM pg_catalog.pg_event_trigger t
  JOIN pg_catalog.pg_proc p ON p.oid = t.evtfoid
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
 WHERE t.evtname LIKE 'ingestd\\_ddl\\_%%'
"""
_FUNCTIONS = """
SELECT p.proname::text, p.prosrc, p.prosecdef, p.proconfig::text
  FROM pg_catalog.pg_proc p
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %s
 WHERE p.pronargs = 0
"""
_VERSION = """
SELECT pg_catalog.obj_description(n.oid, 'pg_namespace')
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
         WHERE g.tgrelid = c.oid AND g.tgenabled = 'A'
           AND g.tgname IN ('ingestd_ddl_truncate', 'ingestd_ddl_truncated')
       ) < CASE WHEN t.is_root THEN 2 ELSE 1 END
 ORDER BY 1
"""
_MAY_NOT_WRITE = """
SELECT p.oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc p
 WHERE p.proname = 'pg_logical_emit_message'
   AND p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
   AND NOT pg_catalog.has_function_privilege('public', p.oid, 'EXECUTE')
"""
_SEARCH_PATH = '{"search_path=pg_catalog, pg_temp"}'
_NAMED = 3


@cache
def script() -> str:
    """Return the SQL."""
    return resources.files(__package__).joinpath("ddl_log.sql").read_text("utf-8")


@cache
def bodies() -> dict[str, str]:
    """Return the body of each of its functions, as pg_proc.prosrc has it."""
    return dict(_FUNCTION.findall(script()))


@dataclass(frozen=True, slots=True)
class DdlLogFault:
    """What is not in place, so that catalog checks alone are what counts."""

    what: str
    remedy: str = REMEDY


async def ddl_log_fault(
    connection: AsyncConnection[Any], tables: Collection[int]
) -> DdlLogFault | None:
    """Say what lacks of what the script makes, for these tables; None if all is in place."""
    comment = next((row[0] for row in await _of(connection, _VERSION, SCHEMA)), None)
    return (
        _of_functions(await _of(connection, _FUNCTIONS, SCHEMA), comment or "")
        or _of_triggers(await _of(connection, _TRIGGERS))
        or _of_rights([name for (name,) in await _of(connection, _MAY_NOT_WRITE)])
        or _of_tables([name for (name,) in await _of(connection, _UNWATCHED, list(tables), SCHEMA)])
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
        return DdlLogFault(what, "run a newer ingestd, or the script that this one's check prints")
    for name, body in expected.items():
        if name not in found:
            return DdlLogFault(f"function {SCHEMA}.{name}() is missing")
        if found[name] != [body, False, _SEARCH_PATH]:
            return DdlLogFault(f"function {SCHEMA}.{name}() was altered")
    return None


def _of_rights(functions: list[str]) -> DdlLogFault | None:
    if not functions:
        return None
    remedy = " ".join(f"GRANT EXECUTE ON FUNCTION {name} TO PUBLIC;" for name in functions)
    return DdlLogFault("not every role may execute pg_logical_emit_message", remedy)


def _of_triggers(rows: list[tuple[Any, ...]]) -> DdlLogFault | None:
    found = {name: row for name, *row in rows}
    for function, event in _EVENTS.items():
        name = f"{SCHEMA}_{function}"
        at, enabled, schema, called = found.get(name, (None, None, None, None))
        if at is None:
            return DdlLogFault(f"event trigger {name} is missing")
        if (at, schema, called) != (event, SCHEMA, function):
            return DdlLogFault(f"event trigger {name} was altered")
        if enabled != "A":
            what = f"event trigger {name} is disabled, wholly or for some sessions"
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
