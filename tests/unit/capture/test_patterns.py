"""Which tables the patterns ask for, and which of them are not there."""

from __future__ import annotations

from pydantic import SecretStr

from ingestd.capture.patterns import missing_tables, unmatched, why_left_out
from ingestd.config import SourceSettings
from ingestd.schema import TableId

PRESENT = [TableId("public", "orders"), TableId("a.b", "x.y"), TableId("a", "b.x")]


def source(*tables: str) -> SourceSettings:
    return SourceSettings(kind="", dsn=SecretStr("-"), tables=list(tables))


def test_a_table_named_outright_must_be_there() -> None:
    found = missing_tables(source("public.order", "public.orders", "!public.x", "x.*"), PRESENT)
    [missing] = found
    assert missing.table.id == TableId("public", "order")
    assert missing.error.remedy is not None
    assert missing.error.remedy.startswith("did you mean 'public.orders'?")


def test_a_schema_with_a_dot_is_told_from_a_table_with_one() -> None:
    assert missing_tables(source('"a.b".x.y', "a.b.x"), PRESENT) == []
    [missing] = missing_tables(source('"a.b.x".y'), PRESENT)
    assert missing.table.id == TableId("a.b.x", "y")


def test_a_pattern_that_matches_nothing_yet_is_told() -> None:
    patterns = ("public.*", "sales.*", '"a.b".*', '"a.c".*', "a.b.?", "!none.*")
    assert unmatched(source(*patterns), PRESENT) == ["sales.*", '"a.c".*']


def test_a_table_that_is_not_asked_for_is_told_why() -> None:
    settings = source("public.*", "app.x", "!public.audit_*", "!*.y")
    assert why_left_out(settings, TableId("public", "orders")) is None
    assert why_left_out(settings, TableId("app", "z")) == "not matched by `tables`"
    excluded = why_left_out(settings, TableId("public", "audit_x"))
    assert excluded == "left out by '!public.audit_*' in `tables`"
    assert why_left_out(settings, TableId("public", "y")) == "left out by '!*.y' in `tables`"
    assert why_left_out(settings, TableId("app", "y")) == "not matched by `tables`"
