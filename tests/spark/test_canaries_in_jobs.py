"""No value of a row is in what Spark jobs, their driver and their executors write, whatever fails.

Each job is a process of its own, so that its JVM's log4j and the Python workers' stderr are seen.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.testing.embedded.daemon import module_environment
from tests.harness.canaries import WORD, told_forms
from tests.harness.waiting import await_until
from tests.integration.test_canary_values import (
    EVERY,
    LIMIT_S,
    RAISES,
    TOO_LARGE,
    Aviary,
    aviary,
    config_of,
    in_lake,
)
from tests.spark.conftest import ONCE_COMPILED

if TYPE_CHECKING:
    from tests.conftest import MakeDaemon

__all__ = ["aviary"]
pytestmark = [pytest.mark.attack("reader"), pytest.mark.thorough]
READ = """
import sys, traceback
from spark_jobs.datasource import IngestdDataSource
from spark_jobs.session import local_session

session = local_session("canaries")
session.dataSource.register(IngestdDataSource)
session.sparkContext.setLogLevel("INFO")
reader = session.read.format("ingestd").option("config", sys.argv[1]).option("source", "shop")
for table, where, schema in (
    ("every", None, None),
    ("every", "note::int > 0", None),
    ("every", "raises(note, '22P02')", None),
    ("every", "raises(note, '42883')", None),
    ("every", None, "id int, note date"),
    ("every", None, "note double"),
    ("large", None, None),
):
    one = reader.option("table", f"public.{table}").option("where", where or "true")
    try:
        rows = (one if schema is None else one.schema(schema)).load()
        rows.explain("formatted")
        print("read", sum(1 for _ in rows.toLocalIterator()))
    except Exception:
        print("failed")
        traceback.print_exc()
"""


def run(tmp_path: Path, *command: str | Path) -> tuple[int, str, str]:
    """Run a job, with log4j at INFO; return what it wrote."""
    settings = tmp_path / "log4j2.properties"
    settings.write_text(
        # (pyspark sets the root's level)
        "logger.spark.name = org.apache.spark\nlogger.spark.level = info\n"
        "rootLogger.level = info\nrootLogger.appenderRef.stderr.ref = stderr\n"
        "appender.stderr.type = Console\nappender.stderr.name = stderr\n"
        "appender.stderr.target = SYSTEM_ERR\nappender.stderr.layout.type = PatternLayout\n"
        "appender.stderr.layout.pattern = %p %c: %m%n%ex\n"
    )
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={
            **module_environment(),
            "JDK_JAVA_OPTIONS": f"-Dlog4j2.configurationFile={settings} {ONCE_COMPILED}",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def assert_untold(text: str, where: str) -> None:
    found = told_forms(text)
    assert not found, f"{where}:\n" + "\n".join(line[:2000] for line in found)


def spoil(lake: Path) -> None:
    """Have the newest file of a raw table hold texts, and bounds, where numbers are to be."""
    folder = lake / "shop/public/every"
    file = max(folder.glob("part-*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    rows = pq.read_table(file)
    for number, field in enumerate(rows.schema):
        if not field.name.startswith("_cdc") and not pa.types.is_string(field.type):
            texts = pa.array([WORD] * rows.num_rows)
            rows = rows.set_column(number, field.name, texts)
    pq.write_table(rows, file)


@pytest.mark.timeout(1500)
def test_no_canary_is_in_what_spark_jobs_write(
    aviary: Aviary, lake: Path, tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    aviary.database.execute(RAISES, f"INSERT INTO large VALUES ('{WORD}', {TOO_LARGE})")
    daemon = make_daemon(config_of(aviary, lake, "wal"))
    daemon.start()
    await_until(lambda: in_lake(lake, EVERY, "first"), LIMIT_S, daemon.tail)
    script = tmp_path / "read.py"
    script.write_text(READ)
    target, report = tmp_path / "target", tmp_path / "report"
    source = ("--source", "shop")
    every = ("--lake", lake, *source, "--tables", "public.every", "--once", "--target")
    keeps = {
        "mirror": ("-m", "spark_jobs.mirror", *every, target),
        "history": ("-m", "spark_jobs.history", *every, tmp_path / "history"),
    }
    given = ("--config", daemon.config_path, *source)
    compared = ("--target", target, "--report", report, "--wait", "60s", "public.every")
    code, out, told = run(tmp_path, script, daemon.config_path)
    assert out.count("failed") >= 3, out + told
    assert "read 1" in out
    assert_untold(out + told, "data source")
    for job, command in keeps.items():
        code, out, told = run(tmp_path, *command)
        assert code == 0, told
        assert "INFO" in told
        assert_untold(out + told, job)
    code, out, told = run(tmp_path, "-m", "spark_jobs.reconcile", *given, *compared)
    assert "public.every" in out + told
    assert_untold(told, "reconcile")  # keys that differ are what the user has asked for
    aviary.insert("second")
    await_until(lambda: in_lake(lake, EVERY, "second"), LIMIT_S, daemon.tail)
    daemon.sigterm()
    spoil(lake)
    for job, command in keeps.items():
        code, out, told = run(tmp_path, *command)
        assert code == 1, told
        assert_untold(out + told, f"{job} that fails")
    again = ("-m", "spark_jobs.backfill", *given, "--again", "public.every", "public.large")
    code, out, told = run(tmp_path, *again)
    assert code == 1, told
    assert "is more than the source may hold" in told
    assert_untold(out + told, "backfill")
