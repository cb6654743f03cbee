"""Which tables the patterns match, and which of them do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from ingestd.config import SourceSettings
from ingestd.model.schema import TableId
from ingestd.postgres.captured.selection import (
    missing_table,
    missing_tables,
    named_tables,
    unmatched,
    unmatched_notices,
    why_left_out,
)

PRESENT = [TableId("public", "orders"), TableId("a.b", "x.y"), TableId("a", "b.x")]


def source(*tables: str, sections: dict[str, Any] | None = None) -> SourceSettings:
    values = {"kind": "", "dsn": "-", "tables": list(tables), "table": sections or {}}
    return SourceSettings.model_validate(values)


def test_a_table_named_outright_must_be_there() -> None:
    found = missing_tables(source("public.order", "!public.x", "x.*"), PRESENT)
    [missing] = found
    assert missing.table.id == TableId("public", "order")
    assert missing.error.remedy is not None
    assert missing.error.remedy.startswith("did you mean 'public.orders'?")


def test_a_schema_with_a_dot_is_not_a_table_with_one() -> None:
    assert missing_tables(source('"a.b".x.y', "a.b.x"), PRESENT) == []
    [missing] = missing_tables(source('"a.b.x".y'), PRESENT)
    assert missing.table.id == TableId("a.b.x", "y")


@pytest.mark.parametrize(
    ("tables", "sections", "suggested"),
    [
        (["public.order"], {}, "public.orders"),
        (["public.order", "public.orders"], {}, None),  # it is captured already
        (["public.order", "public.*"], {}, None),
        (["public.order", "!public.orders"], {}, None),  # it is not wanted
        (["publik.orders"], {}, "public.orders"),
        (["public.users"], {}, None),  # only the schema is alike
        (["public.*"], {"public.order": {"reference": "manual"}}, "public.orders"),
        (["public.*"], {"public.order": {"exclude_columns": ["a"]}}, "public.orders"),
        (["public.order*"], {"public.order": {}, "public.orders": {}}, None),  # it has its own
        (["public.order", "!public.orderz"], {}, "public.orders"),
        (["public.*", "!public.ordrs"], {}, "public.orders"),  # that was to be excluded
        (["a.*", "!a.ordrs"], {}, None),
    ],
)
def test_what_is_suggested_would_help(
    tables: list[str], sections: dict[str, Any], suggested: str | None
) -> None:
    settings = source(*tables, sections=sections)
    missing = [t for t in named_tables(settings) if t not in PRESENT]
    found = missing_table(settings, missing[0], PRESENT).remedy or ""
    assert found.startswith("correct ") if suggested is None else f"{suggested!r}?" in found


@pytest.mark.parametrize(
    ("tables", "sections", "told"),
    [
        (["public.*"], {}, []),
        (["public.*", "!public.tmp_*"], {}, []),
        (["sales.*", "public.*"], {}, ["no table matches 'sales.*'"]),
        (["public.*", "!public.audit"], {}, ["it excludes nothing"]),
        (["public.orders", "a.*", "!public.*"], {}, ["'public.orders' in `tables` matches is"]),
        (["public.ord*", "a.*", "!public.*"], {}, ["'public.ord*' in `tables` matches is"]),
        (["public.*"], {"public.ordrs": {"mask_columns": {"a": "null"}}}, ["mask_columns"]),
        (["public.ordrs"], {"public.ordrs": {"exclude_columns": ["a"]}}, []),  # refused
        (["public.*"], {"public.ordrs": {"reference": "manual"}}, []),  # stopped
    ],
)
def test_what_holds_for_no_table_is_noticed(
    tables: list[str], sections: dict[str, Any], told: list[str]
) -> None:
    notices = unmatched_notices(source(*tables, sections=sections), PRESENT)
    assert len(notices) == len(told), notices
    for notice, part in zip(notices, told, strict=True):
        assert part in notice.what
        assert notice.remedy


def test_a_pattern_without_a_match_is_reported() -> None:
    patterns = ("public.*", "sales.*", '"a.b".*', '"a.c".*', "a.b.?", "!none.*")
    assert unmatched(source(*patterns), PRESENT) == ["sales.*", '"a.c".*']


def test_the_reason_a_table_is_left_out_is_reported() -> None:
    settings = source("public.*", "app.x", "!public.audit_*", "!*.y")
    assert why_left_out(settings, TableId("public", "orders")) is None
    assert why_left_out(settings, TableId("app", "z")) == "not matched by `tables`"
    excluded = why_left_out(settings, TableId("public", "audit_x"))
    assert excluded == "excluded by '!public.audit_*' in `tables`"
    assert why_left_out(settings, TableId("public", "y")) == "excluded by '!*.y' in `tables`"
    assert why_left_out(settings, TableId("app", "y")) == "not matched by `tables`"
