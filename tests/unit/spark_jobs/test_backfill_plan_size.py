"""A forged plan of a backfill takes no more memory than a few times the limit of its size."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.store.store import open_store
from spark_jobs.backfills.record import MOST_BYTES, Record

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

READ = """
import resource, sys
from ingestd.lake.store.store import open_store
from ingestd.model.errors import OperatorError
from spark_jobs.backfills.record import Record
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
try: Record(open_store(sys.argv[1], None), "shop/public/bad").last_plan()
except OperatorError as error: print(str(error)[:150], file=sys.stderr)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [63 << 20, 16 << 20, MOST_BYTES // 24 * 3 - 100])
@pytest.mark.parametrize("value", ["[]", "{}"])
def test_a_plan_takes_a_few_times_its_size(tmp_path: Path, size: int, value: str) -> None:
    run = tmp_path / "shop/public/bad/_backfill/0001-a"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(f'{{"run": [{f"{value}," * (size // 3)}{value}]}}')
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert "wrote this" in done.stderr
    assert int(done.stdout) < 4 * 64


def test_runs_are_ordered_by_number(tmp_path: Path) -> None:
    read: list[str] = []

    class WithoutPlans(Record):
        def _plan(self, run: str) -> None:
            read.append(run)

    record = WithoutPlans(open_store(str(tmp_path), None), "t")
    names = ["9999-a", "10000-a", "0001-a", "999999999-a", "zzz", "99999-b"]
    for name in names:
        (tmp_path / "t" / "_backfill" / name).mkdir(parents=True)
    record.last_plan()
    assert read == ["99999-b", "10000-a", "9999-a", "0001-a", "zzz", "999999999-a"]
