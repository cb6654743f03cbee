from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.pairs import PAIRS, Pair, ensure_pair
from spark_jobs.session import PARQUET_SETTINGS, cached_jars, job_session

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark_matrix


def test_missing_java_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        OperatorError, match=r"needs Java \d+ or later; found none(.|\n)*apt install openjdk-17"
    ):
        ensure_pair()


def test_old_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.7.0_402\"' >&2\n", encoding="ascii")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(OperatorError, match="found 7"):
        ensure_pair()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_cached_jars_are_taken_only_if_all_are_there(tmp_path: Path, pair: Pair) -> None:
    version = pair.releases[1]
    names = [f"{artifact}-{version}.jar" for artifact in pair.jars]
    jars = tmp_path / ".ivy2.5.2" / "jars"
    jars.mkdir(parents=True)
    (jars / f"io.delta_{names[0]}").touch()
    assert cached_jars(pair, tmp_path) is None
    other = tmp_path / ".m2" / "repository" / "io" / "delta" / "delta-storage" / version
    other.mkdir(parents=True)
    (other / names[1]).touch()
    assert cached_jars(pair, tmp_path) == [jars / f"io.delta_{names[0]}", other / names[1]]


def test_session_is_local_and_in_utc(spark: SparkSession) -> None:
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.ui.enabled") == "false"
    [row] = spark.sql("SELECT string(timestamp '2026-01-02T03:04:05Z') AS at").collect()
    assert row.at == "2026-01-02 03:04:05"


def test_the_session_that_runs_is_taken_as_it_is(spark: SparkSession) -> None:
    before = settings_of(spark)
    with ThreadPoolExecutor(1) as threads:  # another thread has no active session
        taken = threads.submit(job_session, "ingestd test", needs_delta=True).result()
    assert settings_of(taken) == settings_of(spark) == before
    assert taken.sparkContext is spark.sparkContext
    assert [row.id for row in taken.range(1).collect()] == [0]


def settings_of(session: SparkSession) -> dict[str, str]:
    return {row["key"]: row["value"] for row in session.sql("SET").collect()}


def test_dates_in_files_are_of_one_calendar(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in PARQUET_SETTINGS} == PARQUET_SETTINGS
