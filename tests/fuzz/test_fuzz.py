"""The corpus and a few thousand mutations of it; `make fuzz` runs for as long as you like."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.decode.copy.columnar import ColumnarDecoder
from tests.fuzz import targets
from tests.fuzz.framing import feeds_of, input_of
from tests.fuzz.mutations import mutated
from tests.fuzz.plain import PlainOrder
from tests.fuzz.targets import TARGETS
from tests.unit.decode.plain import Plain

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parent / "corpus"
TRIES = {"wire": 2000, "replication": 2000, "values": 600}
OTHERS = 150
"""How many inputs are made for a target that is slower."""


def inputs_of(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_server_sent_is_decoded_as_the_plain_decoder_does(target: str) -> None:
    found = [TARGETS[target](data) for data in inputs_of(target)]
    assert found
    assert all(found)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_a_protocol_error_comes_of_changed_bytes(target: str) -> None:
    """And what is accepted equals the plain decoder's result."""
    rng = random.Random(target)
    inputs = inputs_of(target)
    for number in range(TRIES.get(target, OTHERS)):
        data = mutated(rng, inputs)
        try:
            TARGETS[target](data)
        except BaseException as error:
            error.add_note(f"input {number}: {data.hex()}")
            raise


WRONG: dict[str, tuple[object, str, Callable[..., object]]] = {
    "wire": (targets, "socket_messages", lambda _: ([], None, 0)),
    "replication": (targets, "frames", lambda _: ([], 0, None, False)),
    "stream": (Plain, "emit", lambda *_: None),
    "streamed": (PlainOrder, "feed", lambda *_: None),
    "copied": (targets, "copied_rows", lambda *_: []),
    "values": (targets, "typed", lambda *_: "x"),
}
"""By target: what makes the plain decoder give something else."""


@pytest.mark.parametrize("target", WRONG)
def test_a_difference_is_found(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[target])
    inputs = inputs_of(target)
    with pytest.raises(AssertionError):
        all(TARGETS[target](data) for data in inputs)


def test_another_error_than_protocol_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError

    monkeypatch.setattr(ColumnarDecoder, "feed", fail)
    with pytest.raises(IndexError):
        TARGETS["columnar"](inputs_of("columnar")[0])


def test_inputs_are_lists_of_messages() -> None:
    feeds = [[b"a", b"", b"bc"], [b"d"], [b"e" * 300]]
    assert feeds_of(input_of(feeds)) == feeds
    assert feeds_of(b"\0\5abc") == [[b"abc"]]  # cut short
