"""Where open transactions wait: in memory, then in unlinked files; and what if both are full."""

from __future__ import annotations

import errno
import gc
import os
import random
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.streamed_transactions import OpenMessages
from ingestd.model.errors import TransientError
from ingestd.postgres.wal.spool import FileSpool, SpoolPolicy
from tests.harness.examples import examples
from tests.unit.decode.streamed_server import Server
from tests.unit.decode.test_streamed_transactions import (
    CUTS,
    FIRST_XIDS,
    assert_as_committed,
    ordered,
)


def spool(policy: SpoolPolicy | None = None, memory_bytes: int = 3000) -> FileSpool:
    policy = policy or SpoolPolicy(1 << 30)
    return FileSpool(policy, memory_bytes=memory_bytes, where="source s", frame_bytes=2500)


def messages(count: int, xid: int = 9, number: int = 0, nbytes: int = 1000) -> OpenMessages:
    ends = np.arange(1, count + 1, dtype=np.int64) * nbytes
    xids = np.full(count, xid, np.uint32)
    return OpenMessages(os.urandom(count * nbytes), ends - nbytes, ends, xids, number)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def content(pieces: list[OpenMessages]) -> list[tuple[bytes, int]]:
    return [
        (bytes(p.buffer[a:b]), int(x))
        for p in pieces
        for a, b, x in zip(p.starts, p.ends, p.xids, strict=True)
    ]


@examples(60)
@given(st.integers(0, 2**32), FIRST_XIDS, CUTS, st.sampled_from([0, 3000, 1 << 20]))
def test_whole_transactions_through_files(
    seed: int, first_xid: int, cuts: list[int], memory_bytes: int
) -> None:
    server = Server(random.Random(seed), first_xid)
    server.run(400)
    kept = spool(memory_bytes=memory_bytes)
    assert_as_committed(server, ordered(server.wire, cuts, kept))
    assert kept.nbytes == 0


def test_bounded_spool_memory_and_no_files_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept, pieces = spool(memory_bytes=8000), [messages(3, number=3 * n) for n in range(20)]
    for n, piece in enumerate(pieces):
        kept.append_messages(n % 2, piece)
        assert kept.memory_bytes <= 8000
    assert kept.nbytes > 60_000
    assert list(tmp_path.iterdir()) == []
    assert content(list(kept.pop_transaction(1))) == content(pieces[1::2])
    assert content(list(kept.pop_transaction(0))) == content(pieces[::2])
    assert kept.nbytes == 0


def test_files_are_for_this_account_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        kept = spool(memory_bytes=0)
        kept.append_messages(1, messages(3))
    finally:
        os.umask(before)
    links = {fd: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    modes = [fd.stat().st_mode for fd, path in links.items() if path.startswith(str(tmp_path))]
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600]
    kept.drop(1)


def test_aborts_reach_back_into_the_file() -> None:
    kept = spool(memory_bytes=0)
    pieces = [messages(2, xid) for xid in (9, 10, 11, 11, 10, 9, 12, 13, 13)]
    for piece in pieces:
        kept.append_messages(9, piece)
    kept.abort(9, 14)
    kept.abort(9, 13)
    kept.abort(9, 12)
    before = kept.nbytes
    kept.abort(9, 10)  # ended by 9, which it is not a part of: it has nothing here
    assert kept.nbytes == before
    kept.append_messages(9, pieces[-1])
    kept.abort(9, 10)
    assert content(list(kept.pop_transaction(9))) == content(pieces[:6])
    kept.abort(9, 10)
    kept.drop(9)


def test_i9_what_is_undone_of_a_piece_is_not_kept() -> None:
    kept = spool(memory_bytes=1 << 20)
    piece = messages(4)
    piece.xids[1:] = 10
    sent = bytearray(piece.buffer)
    kept.append_messages(9, replace(piece, buffer=memoryview(sent)))
    kept.abort(9, 10)
    assert kept.memory_bytes < 3000
    sent.clear()  # which is refused while a view of it exists


def test_files_are_closed_when_dropped() -> None:
    gc.collect()
    before = open_files()
    kept = spool(memory_bytes=0)
    for xid in range(5):
        kept.append_messages(xid, messages(1))
    assert open_files() == before + 5
    for xid in range(5):
        kept.drop(xid)
    assert open_files() == before


def test_files_are_closed_with_the_connection() -> None:
    """Errors, their frames and the spool may refer to each other: nothing waits for the collector.

    A thread that writes meanwhile ends as it would have.
    """
    gc.collect()
    before = open_files()
    kept = spool(memory_bytes=0)
    kept.append_messages(1, messages(1))
    assert open_files() == before + 1
    kept.close()
    assert (kept.nbytes, open_files()) == (0, before)
    kept.append_messages(1, messages(1))
    kept.close()
    assert open_files() == before


def test_over_the_limit_is_refused_and_the_next_session_skips_it() -> None:
    policy = SpoolPolicy(5000)
    assert policy.takes_open_transactions
    policy.connected()
    kept = spool(policy)
    kept.append_messages(1, messages(3))
    with pytest.raises(TransientError, match=r"source s: .* exceed 5000 bytes") as raised:
        kept.append_messages(2, messages(3))
    assert raised.value.reason == "open_transactions"
    for _ in range(2):  # an attempt to connect that fails changes nothing
        assert not policy.takes_open_transactions
    policy.connected()
    assert policy.takes_open_transactions
    assert not SpoolPolicy(0).takes_open_transactions


def test_a_full_disk_is_reported_and_the_next_session_skips_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    policy = SpoolPolicy(1 << 30)
    with pytest.raises(TransientError, match="No space left on device") as raised:
        spool(policy).append_messages(1, messages(3))
    assert tempfile.gettempdir() in str(raised.value)
    assert "TMPDIR" in (raised.value.remedy or "")
    assert policy.is_refused


def test_a_missing_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(TransientError, match="/nowhere/at/all: No such file"):
        spool().append_messages(1, messages(3))
