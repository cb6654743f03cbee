"""Makes local Spark sessions on this machine start faster: see `spark_jobs.session_cache`.

    python -m spark_jobs.warm_up

Fetches Delta's jars if they are missing, runs a small job once, and stores the classes that it
loaded. Does nothing if they are already stored.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingestd.model.errors import OperatorError
from ingestd.process.python_command import module_environment, python_command
from spark_jobs.cli.arguments import EXIT_DONE, run_job
from spark_jobs.session import (
    JAVA_OPTIONS,
    LOCAL_SETTINGS,
    class_archive,
    local_session,
    require_spark,
)
from spark_jobs.session_cache import has_plain_path, options_to_make, remove_older

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LIMIT_S = 300.0


def main(arguments: Sequence[str]) -> int:
    """Create the archive if it does not exist. Raises OperatorError if it can't be created."""
    argparse.ArgumentParser(
        prog="python -m spark_jobs.warm_up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    require_spark()
    archive = class_archive()
    if archive is None:
        _fetch_jars()
        archive = class_archive()
    if archive is None:
        raise OperatorError(
            "Delta's jars can't be fetched",
            remedy="see Spark's messages above; without network, put them where a job says",
        )
    if not has_plain_path(archive):
        raise OperatorError(
            f"{archive}: a JVM can't be given a path with blanks",
            remedy="XDG_CACHE_HOME=/a/folder python -m spark_jobs.warm_up; likewise the jobs",
        )
    if archive.exists():
        sys.stdout.write(f"{archive} exists already\n")
        return EXIT_DONE
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            made = Path(folder) / archive.name
            _train(made, folder)
            made.replace(archive)
        remove_older(archive)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(
            f"{archive} can't be created: {error}",
            remedy="jobs run without it, too; set another folder for it with XDG_CACHE_HOME",
        ) from error
    sys.stdout.write(f"created {archive}: local Spark jobs now start faster\n")
    return EXIT_DONE


def _fetch_jars() -> None:
    """Fetch the jars in a separate JVM: the next one must have them on its class path."""
    start = "from spark_jobs.session import local_session; local_session('ingestd warm-up')"
    command = python_command("-c", start)
    subprocess.run(command, env=module_environment(), check=False, timeout=_LIMIT_S)  # noqa: S603


def _train(archive: Path, folder: str) -> None:
    """Do a mirror's work in a JVM that writes its classes to `archive` when it exits."""
    options = LOCAL_SETTINGS[JAVA_OPTIONS] + options_to_make(archive)
    session = local_session("ingestd warm-up", settings={JAVA_OPTIONS: options})
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001 - pyspark has no other way to it
    jvm: subprocess.Popen[bytes] = gateway.proc
    try:
        _run(session, f"{folder}/from", f"{folder}/to")
        session.stop()
        gateway.shutdown()
        assert jvm.stdin is not None
        jvm.stdin.close()  # which ends it
        code = jvm.wait(_LIMIT_S)
    finally:
        jvm.kill()
    if code != 0:
        msg = f"its JVM ended with {code}"
        raise OSError(msg)


def _run(session: SparkSession, source: str, target: str) -> None:
    from delta.tables import DeltaTable  # noqa: PLC0415 - local_session needs it

    rows = session.range(1000).selectExpr("id", "CAST(id AS STRING) AS text", "current_date() AS d")
    for path in (source, target):
        rows.write.format("delta").option("delta.enableDeletionVectors", "true").save(path)
        session.sql(f"ALTER TABLE delta.`{path}` CLUSTER BY (id)")

    def merge(batch: DataFrame, _: int) -> None:
        newest = batch.groupBy("id").agg({"text": "max", "d": "max"}).toDF("id", "text", "d")
        (
            DeltaTable.forPath(batch.sparkSession, target)
            .alias("t")
            .merge(newest.alias("s"), "t.id = s.id")
            .whenMatchedDelete("s.id % 7 = 0")
            .whenMatchedUpdate(set={"text": "s.text"})
            .whenNotMatchedInsertAll()
            .execute()
        )

    stream = session.readStream.format("delta").load(source).writeStream.foreachBatch(merge)
    checkpoint = stream.option("checkpointLocation", f"{target}_checkpoint")
    checkpoint.trigger(availableNow=True).start().awaitTermination()
    session.createDataFrame(session.read.format("delta").load(target).toArrow()).count()


if __name__ == "__main__":
    run_job(main)
