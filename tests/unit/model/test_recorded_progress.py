"""`_tables.progress`: its text, which daemons and jobs of all versions read."""

from __future__ import annotations

import itertools

import pytest

from ingestd.model.recorded_progress import RecordedProgress

TEXTS = {
    "first|1:2": RecordedProgress("1:2", has_marker_last=False),
    "last|1:2": RecordedProgress("1:2"),
    "again|": RecordedProgress("", is_requested=True),
    "again|a|b": RecordedProgress("a|b", is_requested=True),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_progress_has_the_text_that_lakes_have(text: str) -> None:
    assert TEXTS[text].to_text() == text
    assert RecordedProgress.parse(text) == TEXTS[text]


def test_a_progress_is_read_back() -> None:
    for remainder, last, requested in itertools.product(("", "x", "|", "again|"), (0, 1), (0, 1)):
        made = RecordedProgress(
            remainder, has_marker_last=bool(last or requested), is_requested=bool(requested)
        )
        assert RecordedProgress.parse(made.to_text()) == made


def test_without_a_text_the_snapshot_starts_over() -> None:
    assert RecordedProgress.parse("") == RecordedProgress("")
