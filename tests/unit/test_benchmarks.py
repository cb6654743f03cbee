"""The parts of the benchmarks that could report wrong figures."""

from __future__ import annotations

import time

from benchmarks.daemon.staged import STAGES, Stopwatch
from benchmarks.harness.figure import Figure
from benchmarks.harness.report import line_of, read_lines, report


def test_lines_of_a_report_are_read_back_by_what_they_measure() -> None:
    figure = Figure("drain of 1.5M changes, TCP: speed", "1.20 (5.0 s; 3 CPU s)", "1.4", False)  # noqa: FBT003
    lines = {kind + figure.what: line_of(figure, "now, 0.1", kind) for kind in ("", "quick: ")}

    assert read_lines(report(lines, 15)) == lines
    assert lines[figure.what].endswith("| 1.4 | no | now, 0.1 |")


def test_the_functions_of_the_stages_are_there() -> None:
    for _, owner, attribute in STAGES:
        assert callable(getattr(owner, attribute))


def test_a_stage_inside_another_counts_for_itself_alone() -> None:
    watch = Stopwatch()

    def burn(cpu_s: float) -> None:
        end = time.thread_time() + cpu_s
        while time.thread_time() < end:
            pass

    with watch.stage("outer"):
        burn(0.02)
        watch.timed("inner", burn)(0.06)

    assert watch.spent["outer"].cpu_s < watch.spent["inner"].cpu_s
    assert watch.spent["inner"].cpu_s >= 0.06
