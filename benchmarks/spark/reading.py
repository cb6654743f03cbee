"""Current rows of a large table without Spark, a fifth of them changed since the first load.

Each read is a separate process, to measure its peak of resident memory. The mirror job's first load
of the same lake is measured beside.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import ingestd
from benchmarks.harness.rig import Rig
from benchmarks.spark.mirror_lake import COLUMNS, MadeLake, MadeTable

ROWS = 5_000_000
SOURCE = "shop"
_UNSENT = 0.2
"""Share of the updates that do not send the large value."""


def measure(rig: Rig, rows: int = ROWS) -> dict[str, float]:
    """Return CPU seconds, seconds, peak MB, and whether rows differ from the expected ones.

    `all`: of a read of all rows in batches; `one`: of the row with one key; `forward`: of all rows
    by a cache, 1,000 changes after it was filled. `mirror_s`: seconds of the mirror job's first
    load.
    """
    folder = rig.folder / "reading"
    table, lake, rng = write(folder, rows)
    job = [sys.executable, "-m", "spark_jobs.mirror", "--once", "--source", SOURCE]
    began = time.monotonic()
    places = ["--lake", str(folder / "lake"), "--target", str(folder / "mirror")]
    subprocess.run([*job, *places], check=True, stdout=subprocess.DEVNULL)
    found = {"mirror_s": time.monotonic() - began}
    for which in ("all", "one", "fill", "forward"):
        if which == "forward":
            lake.change([(table, table.mixed(rng, 1_000, _UNSENT))])
            table.write_expected(folder / "expected.parquet")
        command = [sys.executable, "-m", __name__, which, str(folder)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        found |= {f"{which}_{name}": value for name, value in json.loads(output).items()}
    return found


def write(folder: Path, rows: int) -> tuple[MadeTable, MadeLake, np.random.Generator]:
    """Write the lake, and the expected rows."""
    table, lake = MadeTable("orders", rows, rows // 10), MadeLake(folder / "lake", SOURCE)
    lake.load([table])
    rng = np.random.default_rng(1)
    for _ in range(4):
        lake.change([(table, table.mixed(rng, rows // 20, _UNSENT))])
    table.write_expected(folder / "expected.parquet")
    return table, lake, rng


def read(which: str, folder: Path) -> dict[str, float]:
    """Read the rows, and compare them with the expected ones.

    Only the reading is timed, with the opening of the lake; not the comparison.
    """
    began, cpu = time.monotonic(), time.process_time()
    cache = str(folder / "cache") if which in {"fill", "forward"} else None
    lake = ingestd.open_lake(str(folder / "lake"), cache=cache)
    table = lake.source(SOURCE).table("public.orders")
    where = pc.field("id") == 77 if which == "one" else None
    reader = table.current_batches(columns=COLUMNS, where=where)
    count, digest = 0, 0
    found = {"s": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
    while True:
        began, cpu = time.monotonic(), time.process_time()
        batch = next(reader, None)
        found["s"] += time.monotonic() - began
        found["cpu_s"] += time.process_time() - cpu
        if batch is None:
            break
        count += batch.num_rows
        digest += _digest(batch)
    found["peak_mb"] = _peak_mb()
    expected = pq.read_table(folder / "expected.parquet")
    if where is not None:
        expected = expected.filter(where)
    same = sum(map(_digest, expected.select(list(COLUMNS)).to_batches())) == digest
    return {**found, "rows": count, "wrong": float(count != expected.num_rows or not same)}


def _peak_mb() -> float:
    """Return this process's peak; that of getrusage includes the parent's before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def _digest(batch: pa.RecordBatch) -> int:
    """Return a sum over the rows: it is independent of their order."""
    from ingestd.digests.value_hashes import row_hashes  # noqa: PLC0415 - not part of the read

    plain = batch.cast(pa.schema([f.remove_metadata() for f in batch.schema]))
    return int(row_hashes(plain.columns, plain.num_rows).astype(object).sum())


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1], Path(sys.argv[2]))))
