"""Lines between readers and the keeper."""

from __future__ import annotations

import pytest

from ingestd.errors import OperatorError, TransientError
from spark_jobs.keeper_protocol import (
    KeeperAddress,
    failure,
    from_text,
    raise_failure,
    signed,
    to_text,
    verified,
)


def test_only_who_has_the_token_is_heard() -> None:
    line = signed("token", "nonce", {"asks": "there"})
    assert verified("token", "nonce", line) == {"asks": "there"}
    assert verified("token", "another", line) is None
    assert verified("other", "nonce", line) is None
    assert verified("token", "nonce", line.replace(b"there", b"plan!")) is None
    assert verified("token", "nonce", b"\xff\x00\n") is None


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(KeeperAddress("h", 1, "secret"))


def test_errors_come_through() -> None:
    raise_failure({})
    with pytest.raises(OperatorError, match="what") as operator:
        raise_failure(failure(OperatorError("what", remedy="do")))
    assert operator.value.remedy == "do"
    with pytest.raises(TransientError) as transient:
        raise_failure(failure(TransientError("what", reason="lost")))
    assert transient.value.reason == "lost"


def test_values_come_through() -> None:
    assert from_text(to_text({"a": (1, b"\n")})) == {"a": (1, b"\n")}
