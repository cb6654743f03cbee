"""Allocator settings, and returning memory to the system.

A dozen threads of the daemon hold tens of MB of buffers for a moment each. By default each
thread's heap keeps its peak size, three times what is in use. So Arrow uses the C library's heap,
not the allocator that it brings. One heap serves all threads, and large blocks are mapped
separately and unmapped when freed. Measured with a backlog of 1.5M changes: at most 302 MB instead
of 418, at the same CPU. deltalake brings its own allocator, jemalloc, with four heaps per core that
keep free memory for ten seconds; one heap and half a second are enough. Measured after 3,000
epochs: 208 MB instead of 232. Source: mallopt(3); Arrow, "Memory Pools"; jemalloc(3).

numpy brings OpenBLAS, whose threads spin for a while after they start. That costs 0.1 s of CPU, and
nothing here uses them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""From malloc.h."""
LARGE_BYTES = 4 << 20
KEPT_BYTES = 16 << 20
"""Free memory kept at the end of the heap for the next allocation."""
ARENAS = 1
RUST_MALLOC = "narenas:1,dirty_decay_ms:500,muzzy_decay_ms:0"
"""For the jemalloc in Rust libraries."""

_CHOICES = (
    (_ARENA_MAX, "MALLOC_ARENA_MAX", ARENAS),
    (_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", LARGE_BYTES),
    (_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", KEPT_BYTES),
)


def configure_allocators() -> None:
    """Configure the allocators. Call before importing numpy, pyarrow and deltalake.

    These read the environment. Variables that are already set are kept. If the C library is not
    glibc, its heap is left alone.
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
    """Disable garbage collection, then freeze all objects that exist. For imports.

    The imports at the daemon's start take 0.58 s instead of 0.63.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def resident_bytes() -> int:
    """Return the process's resident memory in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - called often
            return int(statm.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@dataclass(slots=True)
class Trimming:
    """Returns free heap pages to the OS when resident memory is high.

    Small blocks of many tables are freed in a different order than they were allocated, which
    fragments the heap: with 200 tables the holes exceed the memory in use. One per process.
    `limit_bytes`: the process's memory limit for rows. `resident`: the resident memory, in bytes.
    """

    limit_bytes: int = 512_000_000
    resident: Callable[[], int] = resident_bytes
    _least_bytes: int = 0

    def is_due(self) -> bool:
        """Return whether memory is high and has grown since the last trim. Takes about 10 us.

        Small amounts are not trimmed: the next allocation would have to map them again.
        """
        now_bytes = self.resident()
        self._least_bytes = min(self._least_bytes, now_bytes)
        part = 32 if now_bytes > self.limit_bytes * 5 // 8 else 16
        grown_bytes = max(self.limit_bytes // part, LARGE_BYTES * 2)
        return now_bytes > max(self.limit_bytes // 2, self._least_bytes + grown_bytes)

    def trim(self) -> None:
        """Return free pages to the OS. Takes about 20 ms, without the GIL."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(KEPT_BYTES)
        self._least_bytes = self.resident()
