"""How the process gets its memory from the system and gives it back.

The daemon holds some tens of MB of buffers for a moment each, from a dozen threads. Left alone,
every thread's heap keeps what it had at its worst: three times what is in use. So Arrow uses the
C library's heap instead of its own, one for all threads, and whatever is large is mapped by itself
and gone when it is freed. Measured with a backlog of 1.5M changes: 302 MB at the most instead of
418, at the same CPU. deltalake brings an allocator of its own, jemalloc, with four heaps for each
core, which keep what is free for ten seconds: one heap and half a second are enough. Measured after
3,000 epochs: 208 MB instead of 232. Source: mallopt(3); Arrow, "Memory Pools"; jemalloc(3).

numpy brings OpenBLAS, whose threads spin for a while after they start: 0.1 s of CPU, for nothing
that is done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Of malloc.h."""
LARGE_BYTES = 4 << 20
KEPT_BYTES = 16 << 20
"""Free memory at the heap's end that is kept for the next who asks."""
ARENAS = 1
RUST_MALLOC = "narenas:1,dirty_decay_ms:500,muzzy_decay_ms:0"
"""Of the jemalloc that Rust's libraries bring."""

_CHOICES = (
    (_ARENA_MAX, "MALLOC_ARENA_MAX", ARENAS),
    (_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", LARGE_BYTES),
    (_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", KEPT_BYTES),
)


def configure_allocators() -> None:
    """Choose the allocators. Before numpy, pyarrow and deltalake, which read the environment.

    What that says already stays. Leaves the heap alone where the C library is not glibc.
    """
    os.environ.setdefault("_RJEM_MALLOC_CONF", RUST_MALLOC)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    for parameter, variable, value in _CHOICES:
        if variable not in os.environ:
            libc.mallopt(parameter, value)


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Look for no garbage meanwhile, nor ever among what was made: for imports.

    They take 0.58 s instead of 0.63, at the daemon's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@dataclass(slots=True)
class Trimming:
    """Gives back what is free between blocks in use, where the process takes much.

    Small blocks of many tables, which go in another order than they came, leave holes everywhere:
    with 200 tables more than is in use. One for a process. `limit_bytes`: what that may hold of
    rows.
    """

    limit_bytes: int = 512_000_000
    _least_bytes: int = 0

    def is_due(self) -> bool:
        """Whether much is taken, and more than at the least since the last time. Takes some 10 us.

        Not for little: who asks next has to map it again.
        """
        now_bytes = resident_bytes()
        self._least_bytes = min(self._least_bytes, now_bytes)
        part = 32 if now_bytes > self.limit_bytes * 5 // 8 else 16
        grown_bytes = max(self.limit_bytes // part, LARGE_BYTES * 2)
        return now_bytes > max(self.limit_bytes // 2, self._least_bytes + grown_bytes)

    def trim(self) -> None:
        """Do it: some 20 ms, without the interpreter's lock."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(KEPT_BYTES)
        self._least_bytes = resident_bytes()


def resident_bytes() -> int:
    """Say how much memory the process has; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as told:  # noqa: PTH123 - it is asked often
            return int(told.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
