"""Spark's class archive, kept between runs: a JVM uses it or does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.session import class_archive
from spark_jobs.session_cache import archive_path
from spark_jobs.warm_up import main

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


@pytest.mark.thorough
def test_an_existing_archive_is_used_by_sessions(tmp_path: Path) -> None:
    archive = class_archive()
    if archive is None or not archive.exists():
        pytest.skip("no archive here: `make warm` makes it")
    cache = tmp_path / "cache"
    (cache / "ingestd").mkdir(parents=True)
    (cache / "ingestd" / archive.name).symlink_to(archive)
    assert "exists already" in run("-m", "spark_jobs.warm_up", cache=cache)
    assert "rows 3 mapped True" in run("-c", SESSION, cache=cache)


@pytest.mark.long
def test_an_archive_is_made_once_and_taken_by_sessions(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "now start faster" in run("-m", "spark_jobs.warm_up", cache=cache)
    [archive] = (cache / "ingestd").iterdir()
    assert "exists already" in run("-m", "spark_jobs.warm_up", cache=cache)
    said = run("-c", SESSION, cache=cache)
    assert "rows 3 mapped True" in said
    archive.unlink()
    assert "rows 3 mapped False" in run("-c", SESSION, cache=cache)


def test_another_java_or_jar_is_another_archive(tmp_path: Path) -> None:
    jar, other = tmp_path / "a.jar", tmp_path / "b.jar"
    jar.touch()
    other.touch()
    one = archive_path("java 17.0.1", [jar])
    assert one == archive_path("java 17.0.1", [jar])
    found = {one, archive_path("java 17.0.2", [jar]), archive_path("java 17.0.1", [other])}
    os.utime(jar, (1, 1))
    assert len(found | {archive_path("java 17.0.1", [jar])}) == 4


def test_a_path_with_blanks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    with pytest.raises(OperatorError, match="blanks"):
        main([])
