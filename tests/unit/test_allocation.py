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

from ingestd.allocation import keeping_all

GROWS_AND_SHRINKS = dedent("""
    import resource, sys, threading
    from ingestd.allocation import give_back_early
    give_back_early()
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


def run(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", GROWS_AND_SHRINKS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_what_threads_had_at_their_worst_is_given_back() -> None:
    if platform.libc_ver()[0] != "glibc":
        return  # nothing is chosen there
    pool, anonymous_mb = run({})
    assert pool == "system"
    assert int(anonymous_mb) < 60  # one thread's arrays are 8 MB


def test_what_the_environment_says_stays() -> None:
    pool, _ = run({"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"})
    assert pool == "mimalloc"


def test_no_thread_of_openblas_is_started() -> None:
    code = "from ingestd.allocation import *; give_back_early(); import numpy, psutil"
    code += "; print(psutil.Process().num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"


def test_garbage_is_looked_for_again_after_imports_that_fail() -> None:
    def fail() -> None:
        with keeping_all():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_what_is_set_for_deltalake_is_what_its_allocator_looks_for() -> None:
    """Another allocator would pass it over without a word, a wrong value not."""
    if platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc":
        assert b"_RJEM_MALLOC_CONF" in Path(_internal.__file__).read_bytes()
    code = "from ingestd.allocation import *; give_back_early(); import deltalake"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
