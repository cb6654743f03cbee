from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.session import DELTA_VERSION, cached_jars, require_spark

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

NAMES = [f"delta-spark_4.2_2.13-{DELTA_VERSION}.jar", f"delta-storage-{DELTA_VERSION}.jar"]


def test_missing_java_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(OperatorError, match=r"Java 17(.|\n)*apt install openjdk-17"):
        require_spark()


def test_old_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n", encoding="ascii")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(OperatorError, match="Java 17, not 8"):
        require_spark()


def test_cached_jars_are_taken_only_if_all_are_there(tmp_path: Path) -> None:
    jars = tmp_path / ".ivy2.5.2" / "jars"
    jars.mkdir(parents=True)
    (jars / f"io.delta_{NAMES[0]}").touch()
    assert cached_jars(tmp_path) is None
    other = tmp_path / ".m2" / "repository" / "io" / "delta" / "delta-storage" / DELTA_VERSION
    other.mkdir(parents=True)
    (other / NAMES[1]).touch()
    assert cached_jars(tmp_path) == [jars / f"io.delta_{NAMES[0]}", other / NAMES[1]]


def test_session_is_local_and_in_utc(spark: SparkSession) -> None:
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.ui.enabled") == "false"
    [row] = spark.sql("SELECT string(timestamp '2026-01-02T03:04:05Z') AS at").collect()
    assert row.at == "2026-01-02 03:04:05"
