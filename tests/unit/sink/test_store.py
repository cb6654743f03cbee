"""Opening a lake's store."""

from __future__ import annotations

import pytest

from ingestd.errors import OperatorError
from ingestd.sink.store import open_store


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("AWS_S3_ALLOW_UNSAFE_RENAME", "true"),
        ("allow_unsafe_rename", "True"),
        ("aws_conditional_put", "disabled"),
        ("conditional_put", "Disabled"),
    ],
)
def test_one_writer_options_that_let_commits_be_overwritten_are_refused(
    option: str, value: str
) -> None:
    with pytest.raises(OperatorError, match=option):
        open_store("s3://bucket/lake", {option: value})


def test_the_same_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with pytest.raises(OperatorError, match="overwrite"):
        open_store("s3://bucket/lake", {})


def test_an_option_that_cannot_be_read_is_told_as_such() -> None:
    with pytest.raises(OperatorError, match="maybe"):
        open_store("s3://bucket/lake", {"aws_conditional_put": "maybe"})
