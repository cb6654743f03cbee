"""What a verification prints, and its exit code."""

from __future__ import annotations

import pytest

from ingestd.app.verify_report import VerifyReport, asked_for
from ingestd.model.errors import ConfigError, TableError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.ports import Coverage, Refused
from ingestd.ports.verify import Difference, Kind, VerifyOutcome, VerifyState
from ingestd.postgres.settings import WalSettings
from tests.unit.lake.rows import make_table

ORDERS = TableId("public", "orders")
EQUAL = VerifyOutcome("public.a", VerifyState.EQUAL, 1000, 1000)
LEFT_OUT = VerifyOutcome(
    "public.b", VerifyState.NOT_COMPARED, note="a reference table without a change log"
)
REFUSED = VerifyOutcome(
    "public.c", VerifyState.NOT_COMPARED, fault=TableError(ORDERS, "is stopped")
)
LATE = VerifyOutcome("public.d", VerifyState.NOT_REACHED, fault=TransientError("late", reason="x"))
WRONG = VerifyOutcome(
    "public.e",
    VerifyState.DIFFERENT,
    10,
    11,
    counts={Kind.EXTRA: 3, Kind.DIFFERENT: 1},
    differences=(
        Difference(Kind.DIFFERENT, {"id": "1"}, ("note",), 1, {"note": "x"}, {"note": None}),
        Difference(Kind.EXTRA, {"row": "0f"}, count=2),
    ),
)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([EQUAL], 0),
        ([EQUAL, LEFT_OUT], 0),
        ([LEFT_OUT], 1),
        ([], 1),
        ([EQUAL, REFUSED], 1),
        ([EQUAL, LATE], 75),
        ([WRONG, LATE], 1),
        ([REFUSED, LATE], 75),
    ],
)
def test_the_exit_code_is_that_of_the_worst(outcomes: list[VerifyOutcome], code: int) -> None:
    assert VerifyReport("shop", Lsn(16), outcomes).exit_code == code


def test_each_table_is_reported_with_its_differences() -> None:
    assert VerifyReport("shop", Lsn(16), [EQUAL, REFUSED, WRONG]).lines() == [
        "public.a: equal, 1,000 rows",
        "public.c: not compared",
        "    table public.orders: is stopped",
        "public.e: different: 3 extra, 1 different (10 rows in the source, 11 in the lake)",
        "    different id='1'  in note",
        "        source: note='x'",
        "        lake: note=null",
        "    extra     row='0f'  (2 times)",
        "    and 1 more",
        "source shop at 0/10: 1 equal, 1 different, 1 not compared",
    ]


SETTINGS = WalSettings.model_validate(
    {
        "kind": "wal",
        "dsn": "host=127.0.0.1",
        "tables": ["public.*"],
        "slot": "shop",
        "publication": "shop",
        "table": {"public.country": {"reference": "manual"}},
    }
)
COVERAGE = Coverage(
    [make_table("orders"), make_table("items")],
    [Refused(make_table("keyless"), TableError(TableId("public", "keyless"), "no key"))],
)


def test_requested_tables_are_compared_and_others_reported() -> None:
    tables, outcomes = asked_for(COVERAGE, SETTINGS, [])
    assert [str(t.id) for t in tables] == ["public.orders", "public.items"]
    assert {o.table: o.fault is None for o in outcomes} == {
        "public.keyless": False,
        "public.country": True,
    }
    tables, outcomes = asked_for(COVERAGE, SETTINGS, ["public.*", "!public.[ck]*"])
    assert (len(tables), outcomes) == (2, [])


@pytest.mark.parametrize("pattern", ["public.order", "!public.order", "nothing"])
def test_what_is_no_captured_table_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="TABLE"):
        asked_for(COVERAGE, SETTINGS, ["public.*", pattern])
