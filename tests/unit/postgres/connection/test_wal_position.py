from __future__ import annotations

import pytest

from ingestd.model.lsn import Lsn
from ingestd.postgres.connection.wal_position import end_of_record

PAGE = 8192


@pytest.mark.parametrize(
    ("next_record", "end"),
    [
        ("0/3000100", "0/3000100"),
        ("0/3002018", "0/3002000"),  # behind a page's header
        ("0/3002020", "0/3002020"),
        ("0/4000028", "0/4000000"),  # behind a segment's
        ("0/4002028", "0/4002028"),
    ],
)
def test_a_record_ends_before_the_header_of_the_next_page(next_record: str, end: str) -> None:
    assert end_of_record(Lsn.parse(next_record), PAGE) == Lsn.parse(end)
