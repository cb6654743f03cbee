"""Types and functions of the role that owns a table, which report who calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness.databases import Database

CALLED = "a function of the owner was called"
"""Not as a hostile schema's: the tests themselves have these called, by the superuser."""
BODY = f"BEGIN RAISE WARNING '{CALLED} by %', current_user; RETURN {{}}; END"
TYPES = f"""
CREATE SCHEMA m;
CREATE FUNCTION m.evil(text) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ {BODY.format(1)} $$;
CREATE FUNCTION m.inlined(int) RETURNS int IMMUTABLE LANGUAGE sql AS $$ SELECT m.evil('') + $1 $$;
CREATE FUNCTION m.plain(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN $1; END';
CREATE DOMAIN m.checked AS int CHECK (m.evil('') = 1);
CREATE DOMAIN m.named AS text CHECK (m.evil('') = 1);
CREATE TYPE m.mood AS ENUM ('a', 'b', 'c', 'd', 'e', 'f');
CREATE DOMAIN m.feeling AS m.mood;
CREATE TYPE m.pair AS (x m.checked, y int);
CREATE TYPE m.plain_pair AS (x int, y int);
CREATE TYPE m.span AS RANGE (subtype = m.checked);
CREATE TYPE m.plain_span AS RANGE (subtype = int);
CREATE DOMAIN m.theirs AS int CHECK (VALUE >= 0 AND m.evil('') = 1);
CREATE DOMAIN m.above AS m.theirs;
CREATE TYPE m.their_pair AS (x m.theirs, y int);
CREATE DOMAIN m.of_array AS int[] CHECK (m.evil('') = 1);
CREATE DOMAIN m.ours AS int CHECK (VALUE >= 0);
GRANT USAGE ON SCHEMA m TO PUBLIC;
"""
THEIRS = ("theirs", "of_array")
"""The domains that `hand_over` gives to the owner."""


def hand_over(database: Database, owner: str, *functions: str) -> None:
    for function in ("evil(text)", "inlined(int)", "plain(int)", *functions):
        database.execute(f"ALTER FUNCTION m.{function} OWNER TO {owner}")
    for domain in THEIRS:
        database.execute(f"ALTER DOMAIN m.{domain} OWNER TO {owner}")


def calls_of(database: Database, role: str) -> list[str]:
    lines = database.server.log_path.read_text(errors="replace").splitlines()
    return [line for line in lines if f"{CALLED} by {role}" in line]
