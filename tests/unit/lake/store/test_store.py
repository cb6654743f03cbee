"""Opening a lake's store."""

from __future__ import annotations

import pytest

from ingestd.lake.store.store import open_store
from ingestd.model.errors import OperatorError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("AWS_S3_ALLOW_UNSAFE_RENAME", "true"),
        ("allow_unsafe_rename", "True"),
        ("aws_conditional_put", "disabled"),
        ("conditional_put", "Disabled"),
    ],
)
def test_one_writer_options_allowing_overwrites_are_refused(option: str, value: str) -> None:
    with pytest.raises(OperatorError, match=option):
        open_store("s3://bucket/lake", {option: value})


def test_the_same_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with pytest.raises(OperatorError, match="overwrite"):
        open_store("s3://bucket/lake", {})


def test_an_invalid_option_is_reported_by_its_value() -> None:
    with pytest.raises(OperatorError, match="maybe"):
        open_store("s3://bucket/lake", {"aws_conditional_put": "maybe"})
