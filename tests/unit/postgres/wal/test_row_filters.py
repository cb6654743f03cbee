"""Which row filters can't fail, by their texts as Postgres writes them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.wal.slots.row_filters import can_fail

KINDS = {"id": 23, "big": 20, "flag": 16, "note": 25, "code": 1043, "at": 1184, "doc": 3802}
COLUMNS = tuple(Column(name, oid, -1, pa.string()) for name, oid in KINDS.items())
TABLE = Table(TableId("public", "t"), 1, (*COLUMNS, Column('A "b"', 23, -1, pa.int32())))

SAFE = (
    "(id > 1000)",
    "((id > 5) AND (note <> ''::text))",
    "((id > 5) OR (id IS NULL) OR (NOT flag))",
    "flag",
    "(NOT (flag = true))",
    "((code)::text = 'a (b) AND x'::text)",
    "(note = ANY (ARRAY['a'::text, 'b'::text]))",
    "(id = ANY (ARRAY[1, 2, 3]))",
    "(big >= '-5'::bigint)",
    "(at < '2026-01-01 00:00:00+00'::timestamp with time zone)",
    "(doc IS NOT NULL)",
    '((note IS NOT NULL) AND ("A ""b""" = 1.5))',
)
UNSAFE = (
    "((note)::integer > 5)",
    "((100 / id) > 5)",
    "(note > 'm'::text)",
    "(doc = '{}'::jsonb)",
    "((id > 5) AND ((note)::date > '2026-01-01'::date))",
    "(lower(note) = 'x'::text)",
    "(other = 1)",
    "(note ~ 'x'::text)",
    "(note = 'a'::citext)",
    "(id > big)",
    "(flag IS TRUE)",
    "(id > 5) junk",
    "(id > 5",
    "",
    "'",
    "(id OPERATOR(public.=) 5)",
    "(id > 5) OR " * 2000,
)


@pytest.mark.parametrize("text", [*SAFE, *UNSAFE])
def test_only_comparisons_with_constants_are_certain(text: str) -> None:
    assert can_fail(replace(TABLE, row_filter=text)) is (text in UNSAFE)


def test_a_table_without_a_filter_has_none_that_fails() -> None:
    assert not can_fail(TABLE)
