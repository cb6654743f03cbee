from __future__ import annotations

import platform
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pytest

from ingestd.decode.pgoutput.messages import read_messages
from tests.unit.decode import pgoutput

OIDS = range(1, 9)

MANY_TABLES = dedent("""
    from ingestd.process.memory import configure_allocators
    configure_allocators()
    from ingestd.decode.pgoutput.relation import table_of
    from ingestd.decode.pgoutput.decoder import PgoutputDecoder
    from tests.unit.decode import pgoutput

    def heap_mb():
        [line] = [line for line in open("/proc/self/status") if line.startswith("VmData")]
        return int(line.split()[1]) // 1024

    oids = range(1, 101)
    columns = [("id", 23, -1, True), *((f"c{n}", 25, -1, False) for n in range(8))]
    messages = [pgoutput.begin(100)]
    messages += [pgoutput.relation(oid, f"t{oid}", columns) for oid in oids]
    rows = [[b"%d" % n, *[b"value %d" % n] * 8] for n in range(200)]
    messages += [pgoutput.insert(oid, row) for row in rows for oid in oids]
    messages.append(pgoutput.commit(100, 108))
    laid_out = pgoutput.laid_out(messages)
    before_mb = heap_mb()
    kept = PgoutputDecoder(table_of).feed(*laid_out)
    print(heap_mb() - before_mb)
""")
"""3 MB of messages, which give as many bytes of rows."""


def test_messages_of_one_of_many_tables_are_copied_together() -> None:
    """Else what lies between them counts: Arrow reserves by it."""
    inserts = [pgoutput.insert(oid, [b"x" * oid, b"%d" % n]) for n in range(20) for oid in OIDS]
    found = read_messages(*pgoutput.laid_out(inserts))
    for oid in OIDS:
        own = [insert for insert, of in zip(inserts, [*OIDS] * 20, strict=True) if of == oid]
        only = found.only(np.flatnonzero(found.oids == oid))
        assert [only.content(n) for n in range(len(only))] == own
        assert only.source.buffer == b"".join(own)
        assert set(only.oids.tolist()) == {oid}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is not glibc's")
def test_rows_of_many_tables_take_no_more_heap_than_they_need() -> None:
    """Sparsely used pages cost memory beyond the values that they hold."""
    code = [sys.executable, "-c", MANY_TABLES]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400  # 1,300 where it is reserved by what lies between values


def test_messages_that_are_most_of_their_buffer_stay_there() -> None:
    inserts = [pgoutput.insert(1 + (n > 30), [b"%d" % n]) for n in range(50)]
    found = read_messages(*pgoutput.laid_out(inserts, gap=b""))
    only = found.only(np.flatnonzero(found.oids == 1))
    assert only.source is found.source
    assert [only.content(n) for n in range(len(only))] == inserts[:31]


def test_none_of_the_messages_are_none() -> None:
    found = read_messages(*pgoutput.laid_out([pgoutput.insert(1, [b"1"])]))
    assert len(found.only(np.empty(0, np.int64))) == 0
