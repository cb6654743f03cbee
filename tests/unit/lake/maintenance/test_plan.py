"""Which files are joined, and which of a log may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.maintenance.plan import (
    CHECKPOINTS_APART,
    LEAST_FILES,
    MOST_FILES,
    DataFile,
    LogFiles,
    cut_of,
    needless_checkpoints,
    pieces,
    small_files,
)

TARGET = 1000


def file(number: int, size: int) -> DataFile:
    return DataFile(f"part-{number}", size, {"minValues": {"_cdc_epoch": number}})


@given(st.lists(st.integers(1, 400), max_size=60))
def test_pieces_are_bounded_disjoint_and_in_the_order_of_rows(sizes: list[int]) -> None:
    files = [file(n, size) for n, size in enumerate(sizes)]
    found = pieces(reversed(files), TARGET)
    paths = [f.path for piece in found for f in piece]
    assert len(paths) == len(set(paths))
    assert paths == [f.path for f in files if f.path in set(paths)]
    for piece in found:
        assert len(piece) >= LEAST_FILES
        assert sum(f.size_bytes for f in piece) <= TARGET
        assert all(f.size_bytes < TARGET // 4 for f in piece)


def test_a_commit_takes_so_many_files_at_most() -> None:
    found = pieces((file(n, 1) for n in range(2 * MOST_FILES + 20)), 1 << 30)
    assert [len(piece) for piece in found] == [MOST_FILES, MOST_FILES, 20]


def test_bytes_are_rewritten_only_a_few_times_by_compaction() -> None:
    """A file of 1 a tick, joined every 10 ticks, a million of target: a log-structured merge."""
    files: list[DataFile] = []
    written = 0
    for tick in range(20_000):
        files.append(file(tick, 1))
        if tick % 10 == 9:
            for piece in pieces(files, 1_000_000):
                nbytes = sum(f.size_bytes for f in piece)
                written += nbytes
                gone = {f.path for f in piece}
                files = [f for f in files if f.path not in gone]
                files.append(DataFile(piece[0].path, nbytes, piece[0].statistics))
    assert sum(f.size_bytes for f in files) == 20_000
    assert len(files) < 60
    assert written < 12 * 20_000


def test_files_without_statistics_are_ordered_by_age() -> None:
    old, new = DataFile("b", 1, {}, 1), DataFile("a", 1, {}, 2)
    assert small_files([new, old], TARGET) == [old, new]


def test_a_log_is_cut_at_an_old_checkpoint_below_what_is_needed() -> None:
    log = LogFiles({n: float(n) for n in range(31)}, {9: 9.0, 19: 19.0, 29: 29.0})
    assert cut_of(log, 25, 30) == 19
    assert cut_of(log, 25, 18) == 9
    assert cut_of(log, 25, 5) is None
    assert cut_of(log, 5, 30) is None
    assert cut_of(LogFiles({1: 1.0}, {}), 25, 30) is None


def test_a_young_commit_with_an_old_checkpoint_is_no_cut() -> None:
    assert cut_of(LogFiles({9: 30.0}, {9: 9.0}), 25, 30) is None


def test_checkpoints_are_kept_far_apart_and_the_newest_always() -> None:
    step = CHECKPOINTS_APART // 5
    numbers = range(0, 10 * step + 1, step)
    log = LogFiles({}, {n: float(n) for n in numbers})
    needless = needless_checkpoints(log, None, 1e9)
    left = [n for n in numbers if n not in needless]
    assert left == [0, 5 * step, 8 * step, 9 * step, 10 * step]
    assert not [n for n in needless_checkpoints(log, None, 3.0) if n >= 3]
    assert needless_checkpoints(log, 5 * step, 0.0) == [n * step for n in range(5)]
