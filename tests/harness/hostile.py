"""A schema, first in every search path, that shadows all of pg_catalog.

Calling anything in it raises an error, which the server logs. So a run shows every name in our
statements that is neither pinned nor qualified.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

SCHEMA = "hostile"
CALLED = "a hostile function was called"
_ANY = ("text", "name", "oid", "regclass", "regnamespace", "int", "bigint", "bool", "anyelement")
"""Replacements of the pseudo-type "any", which PL/pgSQL lacks: a closer match wins over it."""

_FUNCTIONS = f"""
DO $do$
DECLARE f record; one text;
BEGIN
  FOR f IN
    SELECT DISTINCT p.proname, any_as.type,
           (SELECT string_agg(CASE WHEN t.typname = 'any' THEN any_as.type
                                   ELSE format_type(t.oid, NULL) END, ', ' ORDER BY n)
              FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY a(oid, n)
              JOIN pg_type t ON t.oid = a.oid) AS arguments
      FROM pg_proc p
     CROSS JOIN unnest(ARRAY{list(_ANY)!r}) AS any_as(type)
     WHERE p.pronamespace = 'pg_catalog'::regnamespace
       AND (any_as.type = 'text' OR 2276 = ANY (p.proargtypes::oid[]))
       AND NOT EXISTS (
         SELECT FROM unnest(p.proargtypes::oid[]) a(oid) JOIN pg_type t ON t.oid = a.oid
          WHERE t.typtype = 'p' AND t.typname !~ '^any')
  LOOP
    BEGIN
      EXECUTE format(
        'CREATE FUNCTION {SCHEMA}.%I(%s) RETURNS bool LANGUAGE plpgsql AS %L',
        f.proname, f.arguments,
        format('BEGIN RAISE EXCEPTION %L; END',
               format('{CALLED}: %s(%s)', f.proname, f.arguments)));
    EXCEPTION WHEN duplicate_function OR invalid_function_definition OR feature_not_supported
                OR undefined_object THEN NULL;
    END;
  END LOOP;
END $do$
"""
_OPERATORS = f"""
DO $do$
DECLARE o record;
BEGIN
  FOR o IN
    SELECT p.oprname, p.oprleft, p.oprright, f.proname FROM pg_operator p
      JOIN pg_proc f ON f.oid = p.oprcode
     WHERE p.oprnamespace = 'pg_catalog'::regnamespace
  LOOP
    BEGIN
      EXECUTE format('CREATE OPERATOR {SCHEMA}.%s (%srightarg = %s, function = {SCHEMA}.%I)',
        o.oprname, CASE WHEN o.oprleft = 0 THEN ''
                        ELSE format('leftarg = %s, ', format_type(o.oprleft, NULL)) END,
        format_type(o.oprright, NULL), o.proname);
    EXCEPTION
      WHEN duplicate_function OR undefined_function OR invalid_function_definition THEN NULL;
    END;
  END LOOP;
END $do$
"""
_TYPES = f"""
DO $do$
DECLARE t record;
BEGIN
  FOR t IN SELECT typname FROM pg_type
            WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'd', 'r')
              AND typname !~ '^_' AND typrelid = 0
  LOOP
    EXECUTE format('CREATE DOMAIN {SCHEMA}.%I AS int CHECK ({SCHEMA}.pg_backend_pid())', t.typname);
  END LOOP;
  FOR t IN SELECT relname FROM pg_class
            WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
  LOOP
    EXECUTE format('CREATE VIEW {SCHEMA}.%I AS SELECT {SCHEMA}.pg_backend_pid() AS oid', t.relname);
  END LOOP;
END $do$
"""


def add_hostile_schema(database: Database, victim: str) -> None:
    """Add the schema, and put it into the search path of all later sessions.

    Sessions of the tests themselves are excepted. `victim`: a superuser that is created without
    that exception.
    """
    make_hostile_schema(database)
    set_hostile_path(database, victim)


def make_hostile_schema(database: Database) -> None:
    """Add the schema."""
    with database.connect() as connection:
        connection.execute("SET search_path = pg_catalog")
        connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        for each in (_FUNCTIONS, _OPERATORS, _TYPES):
            connection.execute(each.encode())
        connection.execute(f"GRANT USAGE ON SCHEMA {SCHEMA} TO PUBLIC".encode())


def set_hostile_path(database: Database, victim: str) -> None:
    """Put the schema into the search path of later sessions; see `add_hostile_schema`."""
    with database.connect() as connection:
        for statement in (
            f"CREATE ROLE {victim} LOGIN SUPERUSER",
            f"ALTER DATABASE {database.name} SET search_path = {SCHEMA}, public, pg_catalog",
            f"ALTER ROLE CURRENT_USER IN DATABASE {database.name} SET search_path = public",
        ):
            connection.execute(statement.encode())
    database.server.share_password()


def hostile_calls(server: PostgresServer) -> list[str]:
    """Return the calls of the schema's functions in the server's log."""
    lines = Path(server.log_path).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if CALLED in line]
