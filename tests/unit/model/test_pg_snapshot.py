from __future__ import annotations

import numpy as np
import pytest

from ingestd.model.pg_snapshot import PgSnapshot, is_before


def sees(text: str, *xids: int) -> list[bool]:
    found: list[bool] = PgSnapshot.parse(text).sees(np.array(xids, np.int64)).tolist()
    return found


def test_what_is_below_xmax_and_not_running_is_seen() -> None:
    assert sees("100:110:100,105", 99, 100, 101, 105, 109, 110, 111) == [
        True, False, True, False, True, False, False
    ]  # fmt: skip


def test_nothing_runs() -> None:
    assert sees("7:7:", 6, 7) == [True, False]


def test_the_streams_ids_are_the_low_bits_of_the_nearest() -> None:
    epoch = 3 << 32
    seen = f"{epoch + 5}:{epoch + 10}:{epoch + 7}"
    assert sees(seen, 6, 7, 9, 10, 0xFFFFFFFF) == [True, False, True, False, True]


def test_ids_that_wrapped_around_lie_above() -> None:
    epoch = 2 << 32
    assert sees(f"{epoch - 3}:{epoch - 2}:{epoch - 3}", 0xFFFFFFFC, 0xFFFFFFFD, 0, 3) == [
        True, False, False, False
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "1:2", "a:b:c", "1:2:3:4"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|invalid"):
        PgSnapshot.parse(text)


def test_age_orders_snapshots_by_when_they_were_taken() -> None:
    texts = ["10:12:10,11", "10:12:10", "12:12:", "12:15:12,14", "15:15:"]
    ages = [PgSnapshot.parse(text).age for text in texts]
    assert ages == sorted(ages)


def test_an_id_is_before_another_across_the_wrap() -> None:
    assert is_before(5, 6)
    assert not is_before(6, 6)
    assert is_before(0xFFFFFFFF, (1 << 32) + 2)
    assert not is_before(3, (1 << 32) + 2)
