from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from deltalake import _internal

from ingestd.process.memory import Trimming, gc_frozen

IS_GLIBC = platform.libc_ver()[0] == "glibc"
ON_GLIBC = pytest.mark.skipif(not IS_GLIBC, reason="the C library's heap is not glibc's")
CHOSEN = "from ingestd.process.memory import *; configure_allocators(); "

GROWS_AND_SHRINKS = dedent("""
    import resource, sys, threading
    from ingestd.process.memory import configure_allocators
    configure_allocators()
    import numpy as np, pyarrow as pa
    print(pa.default_memory_pool().backend_name)

    def work():
        for _ in range(20):  # as a decoder does: many arrays, all gone after it
            kept = [pa.array(np.arange(100_000)) for _ in range(10)]
            del kept

    for _ in range(16):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    [line] = [l for l in open("/proc/self/status") if l.startswith("RssAnon")]
    print(int(line.split()[1]) // 1024)
""")
LEAVES_HOLES = dedent("""
    from ingestd.process.memory import Trimming, configure_allocators, resident_bytes
    configure_allocators()
    trimming = Trimming(32 << 20)
    trimming.trim()
    print(trimming.is_due())
    blocks = [bytes(200_000) for _ in range(800)]
    print(trimming.is_due(), Trimming(1 << 40).is_due())
    del blocks[::2]
    before = resident_bytes()
    trimming.trim()
    print(trimming.is_due(), round((before - resident_bytes()) / 1e6))
""")


def told(code: str, environment: dict[str, str] | None = None) -> list[str]:
    """Return the words printed by a separate process, which must succeed without warnings."""
    inherited = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | (environment or {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


@ON_GLIBC
def test_what_threads_had_at_their_worst_is_given_back() -> None:
    pool, anonymous_mb = told(GROWS_AND_SHRINKS)
    assert pool == "system"
    assert int(anonymous_mb) < 60  # one thread's arrays are 8 MB


def test_what_the_environment_says_stays() -> None:
    pool, _ = told(GROWS_AND_SHRINKS, {"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"})
    assert pool == "mimalloc"


@ON_GLIBC
def test_free_heap_is_returned_when_the_process_has_grown() -> None:
    *due, given_back_mb = told(LEAVES_HOLES)
    assert due == ["False", "True", "False", "False"]
    assert int(given_back_mb) > 40  # of 80, less what shares a page with what is in use


def test_growth_counts_from_the_least_since_the_last_time() -> None:
    resident = [0]
    trimming = Trimming(512 << 20, resident=lambda: resident[0] << 20)

    def is_due(megabytes: int) -> bool:
        resident[0] = megabytes
        return trimming.is_due()

    assert not is_due(256)
    assert is_due(257)
    is_due(490)
    trimming.trim()
    assert not is_due(506)
    assert is_due(507)
    assert not is_due(240)
    assert not is_due(272)
    assert is_due(273)
    assert not is_due(200)
    assert not is_due(256)
    assert is_due(257)


def test_no_thread_of_openblas_is_started() -> None:
    assert told(CHOSEN + "import numpy, psutil; print(psutil.Process().num_threads())") == ["1"]


def test_garbage_collection_resumes_after_imports_that_fail() -> None:
    def fail() -> None:
        with gc_frozen():
            assert not gc.isenabled()
            raise ImportError

    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_setting_for_deltalake_is_read_by_its_allocator() -> None:
    """Another allocator would silently ignore it, but a wrong value would be reported."""
    if platform.machine() == "x86_64" and IS_GLIBC:
        assert b"_RJEM_MALLOC_CONF" in Path(_internal.__file__).read_bytes()
    assert told(CHOSEN + "import deltalake") == []
