from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ingestd.model.errors import IngestdError, TableChangedError, TableError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from spark_jobs.reconcile import parser
from spark_jobs.reconciling.differences import RangeSums, differing_ranges, total_rows
from spark_jobs.reconciling.report import (
    Example,
    ReconcileState,
    Reconciliation,
    TableResult,
    exit_code_of,
    summary,
)
from spark_jobs.source.split_frame import TaskFaultError, task_fault

ORDERS = TableId("public", "orders")
EQUAL = TableResult("public.orders", ReconcileState.EQUAL, source_rows=3, mirror_rows=3)
DIFFERENT = TableResult(
    "public.lines",
    ReconcileState.DIFFERENT,
    source_rows=1200,
    missing=1,
    extra=2,
    different=7,
    examples=(
        Example("different", 1, '{"id":"4"}', ("note", "at")),
        Example("extra", 2, "row 00FF", ()),
    ),
)


def failed(fault: IngestdError) -> TableResult:
    return TableResult("public.orders", ReconcileState.NOT_COMPARED, fault=fault)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([], 0),
        ([EQUAL], 0),
        ([EQUAL, DIFFERENT], 1),
        ([failed(TableError(ORDERS, "is stopped"))], 1),
        ([EQUAL, failed(TableChangedError(ORDERS, "was truncated"))], 75),
        ([DIFFERENT, failed(TableChangedError(ORDERS, "was truncated"))], 1),
    ],
)
def test_exit_code_is_that_of_the_worst_table(results: list[TableResult], code: int) -> None:
    assert exit_code_of(results) == code


def test_summary_names_keys_and_columns() -> None:
    run = Reconciliation("x", datetime(2026, 1, 1, tzinfo=UTC), "shop", Lsn(0x10000A0))
    moved = failed(TableChangedError(ORDERS, "was truncated", remedy="compare it again"))
    assert summary(run, [EQUAL, DIFFERENT, moved]).splitlines() == [
        "public.orders: equal, 3 rows",
        "public.lines: 1 missing, 2 extra, 7 different of 1,200 rows",
        '    different {"id":"4"}  in note, at',
        "    extra     row 00FF  (2 rows)",
        "    and 7 more",
        "public.orders: not compared",
        "    table public.orders: was truncated",
        "      remedy: compare it again",
        "source shop at 0/10000A0: 1 equal, 1 different, 1 not compared",
    ]


def test_ranges_differ_by_any_of_their_sums() -> None:
    ours = {1: RangeSums(2, 5, 5), 2: RangeSums(1, 1, 1), 3: RangeSums(1, 1, 1)}
    theirs = {1: RangeSums(2, 5, 5), 2: RangeSums(1, 1, 2), 4: RangeSums(0, 0, 0)}
    assert differing_ranges(ours, theirs) == [2, 3]
    assert total_rows(ours) == 4


@pytest.mark.parametrize(
    "error",
    [
        TransientError("snapshot 1-1: gone", reason="snapshot_gone"),
        TableChangedError(ORDERS, "was 'rewritten'\nor so", remedy='say "again"'),
        TableError(ORDERS, "damaged"),
    ],
)
def test_a_task_tells_the_driver_what_it_failed_with(error: IngestdError) -> None:
    spark_says = f"Job aborted: Traceback\n  File x\n{TaskFaultError(error)}\n\tat org.apache"
    told = task_fault(RuntimeError(spark_says))
    assert type(told) is type(error)
    assert str(told) == str(error)
    assert task_fault(RuntimeError("Job aborted")) is None


def test_arguments_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--config", "c.toml", "--source", "shop", "--target", "mirror"]
    chosen = parser().parse_args([*needed, "--ranges", "1000", "--wait", "2m", "public.*"])
    assert (chosen.ranges, chosen.wait, chosen.tables) == (1024, 120.0, ["public.*"])
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*needed, "--wait", "soon"])
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*needed, "--ranges", "0"])
    assert "1 to 65536" in capsys.readouterr().err
