"""Lines between readers and the keeper."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from ingestd.model.errors import OperatorError, TransientError
from spark_jobs.source.keeper_protocol import (
    KeeperAddress,
    Talk,
    failure,
    from_text,
    raise_failure,
    to_text,
)
from spark_jobs.source.lease import leased

REQUEST = {"asks": "there"}


def talks(token: str = "token", nonces: tuple[str, str] = ("r", "k")) -> tuple[Talk, Talk]:
    """Return a reader's side and the keeper's."""
    return Talk(token, nonces, is_keeper=False), Talk(token, nonces, is_keeper=True)


def test_only_who_has_the_token_is_heard() -> None:
    line = talks()[0].line(REQUEST)
    assert talks()[1].heard(line) == REQUEST
    assert talks(nonces=("r", "other"))[1].heard(line) is None
    assert talks(nonces=("other", "k"))[1].heard(line) is None
    assert talks("other")[1].heard(line) is None
    assert talks()[1].heard(line.replace(b"there", b"plan!")) is None
    assert talks()[1].heard(b"\xff\x00\n") is None
    assert talks()[1].heard(b"") is None


def test_no_line_is_taken_for_another() -> None:
    """Neither its own one, nor a replayed or misplaced one."""
    reader, keeper = talks()
    first, second = reader.line(REQUEST), reader.line(REQUEST)
    assert talks()[0].heard(first) is None
    assert talks()[1].heard(second) is None
    assert [keeper.heard(line) for line in (first, first)] == [REQUEST, None]
    assert talks()[0].heard(keeper.line({"granted": "x"})) == {"granted": "x"}


class FailsUnpickled:
    """Fails the test where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], NoReturn], tuple[str]]:
        return pytest.fail, ("unpickled",)


GRANTED = json.dumps({"granted": to_text(FailsUnpickled())}).encode()


@pytest.mark.parametrize(
    "answers", [b"k\n" + b"00 " + GRANTED + b"\n" * 3, (GRANTED + b"\n") * 3, b""]
)
def test_an_impostor_of_the_keeper_learns_nothing(answers: bytes) -> None:
    """An unsigned answer is not unpickled, and no plan is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        told = pool.submit(_impersonate, server, answers)
        keeper = KeeperAddress("127.0.0.1", server.getsockname()[1], "token")
        with pytest.raises(TransientError) as error, leased(keeper, "plan", None, 0):
            pytest.fail("leased")
        assert error.value.reason == "keeper_unreachable"
        nonce, *more = told.result().splitlines()
    assert len(nonce) == 32
    assert more == []


def _impersonate(server: socket.socket, answers: bytes) -> bytes:
    """Send `answers` to any request; return what was received."""
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as told:
        first = told.readline()
        connection.sendall(answers)
        connection.shutdown(socket.SHUT_WR)
        return first + told.read()


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
