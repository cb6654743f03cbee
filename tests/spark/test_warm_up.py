"""Spark's classes kept between runs: a JVM takes the archive, or does without a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spark_jobs.class_archive import archive_path

SESSION = """
from pathlib import Path
from spark_jobs.session import local_session
session = local_session("archive")
maps = Path(f"/proc/{session.sparkContext._gateway.proc.pid}/maps").read_text()
print("rows", session.range(3).count(), "mapped", "/ingestd/spark-" in maps)
"""


def run(*arguments: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_an_archive_is_made_once_and_taken_by_sessions(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "start sooner now" in run("-m", "spark_jobs.warm_up", cache=cache)
    [archive] = (cache / "ingestd").iterdir()
    assert "is there" in run("-m", "spark_jobs.warm_up", cache=cache)
    said = run("-c", SESSION, cache=cache)
    assert "rows 3 mapped True" in said
    archive.chmod(0o600)
    archive.write_bytes(archive.read_bytes()[:100_000])
    said = run("-c", SESSION, cache=cache)
    assert "rows 3 mapped False" in said
    assert "cds" not in said


def test_another_java_spark_or_jar_is_another_archive() -> None:
    one = archive_path("java 17.0.1", "4.2.0", [Path("a.jar")])
    assert one == archive_path("java 17.0.1", "4.2.0", [Path("a.jar")])
    others = {
        archive_path("java 17.0.2", "4.2.0", [Path("a.jar")]),
        archive_path("java 17.0.1", "4.2.1", [Path("a.jar")]),
        archive_path("java 17.0.1", "4.2.0", [Path("b.jar")]),
    }
    assert len(others - {one}) == 3
