"""Rows of numbers in partitions: all are read back, and written ones use little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ingestd.pipeline.verify.spill import NumberPartitions, partition_of

COUNT = 256
SALT = 12_345


@pytest.mark.parametrize("memory_bytes", [0, 20_000, 1 << 30])
def test_each_row_comes_back_in_its_part(memory_bytes: int) -> None:
    random = np.random.default_rng(1)
    with NumberPartitions(4, 2, memory_bytes) as partitions:
        given = [random.integers(0, 1 << 64, (size, 2), np.uint64) for size in (1, 300, 0, 99)]
        for rows in given:
            partitions.add_rows(rows, partition_of(rows[:, 0], 4, SALT))
        every = np.concatenate(given)
        for number in range(4):
            own = every[partition_of(every[:, 0], 4, SALT) == number]
            assert partitions.rows_in(number) == len(own)
            assert partitions.pop_partition(number).tolist() == own.tolist()


def test_memory_does_not_grow_with_the_rows() -> None:
    """Neither with what is written, nor where a batch has one row for a part."""
    memory_bytes = 1 << 20
    random = np.random.default_rng(2)
    tracemalloc.start()
    try:
        with NumberPartitions(COUNT, 3, memory_bytes) as partitions:
            for _ in range(300):
                rows = random.integers(0, 1 << 64, (COUNT, 3), np.uint64)
                partitions.add_rows(rows, partition_of(rows[:, 0], COUNT, SALT))
            assert partitions.rows == 300 * COUNT
            assert tracemalloc.get_traced_memory()[1] < 1.5 * memory_bytes
    finally:
        tracemalloc.stop()


def test_no_client_chooses_keys_of_one_partition() -> None:
    """Their hashes are close to each other, as a client can make them by inverting the hash."""
    chosen = np.arange(1 << 14, dtype=np.uint64)
    for salt in (SALT, SALT + 1):
        rows = np.bincount(partition_of(chosen, COUNT, salt), minlength=COUNT)
        assert rows.max() < 3 * len(chosen) / COUNT
    assert chosen.tolist() == list(range(1 << 14))
