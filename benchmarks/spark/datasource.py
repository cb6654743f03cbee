"""`format("ingestd")` against Spark's JDBC source: a table of 1M rows, all columns used.

Spark runs in a separate process, with a JVM as users have it by default, not one tuned to start
fast. Both sources run alternately, with the same number of partitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from benchmarks.harness.rig import COLUMNS, LIMIT_S, ROW, Rig, config, source
from ingestd.testing.embedded.passwords import random_password

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 1_000_000
PARTITIONS = (2, 4)
WARM_UPS, RUNS = 3, 7
_PASSWORD = "JDBC_PASSWORD"
_JDBC = "org.postgresql:postgresql:42.7.4"
_EVERY_COLUMN = (
    "sum(id)",
    "sum(customer)",
    "sum(amount)",
    "sum(octet_length(status))",
    "sum(octet_length(note))",
    "count_if(is_open)",
    "max(created)",
    "max(due)",
    "sum(score)",
    "sum(octet_length(payload))",
)


def measure(rig: Rig) -> dict[int, dict[str, float]]:
    """Return the medians by number of partitions, in seconds: `ingestd_s`, `jdbc_s`, `ratio`.

    Raise RuntimeError if Spark fails.
    """
    rig.psql("DROP TABLE IF EXISTS wide")
    rig.psql(f"CREATE TABLE wide ({COLUMNS})")
    rig.psql(f"INSERT INTO wide SELECT {ROW} FROM generate_series(1, {ROWS}) i")
    rig.psql("VACUUM ANALYZE wide")
    rig.psql("CHECKPOINT")
    path = rig.folder / "datasource.toml"
    path.write_text(config(source("shop", rig.server.dsn(), "public.wide")))
    command = [sys.executable, "-m", "benchmarks.spark.datasource", rig.server.dsn(), str(path)]
    password = random_password()  # the driver reads no passfile, and refuses quick verifiers
    with rig.server.connect() as connection:
        connection.execute(sql.SQL("CREATE ROLE jdbc LOGIN PASSWORD {}").format(password))
        connection.execute("GRANT SELECT ON wide TO jdbc")
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=2 * LIMIT_S,
        env={**os.environ, _PASSWORD: password},
    )
    rig.psql("DROP OWNED BY jdbc")
    rig.psql("DROP ROLE jdbc")
    rig.psql("DROP TABLE wide")
    if done.returncode:
        msg = f"Spark ended with {done.returncode}"
        raise RuntimeError(msg)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return {int(partitions): figures for partitions, figures in found.items()}


def _run(dsn: str, config_path: str) -> dict[int, dict[str, float]]:
    from spark_jobs.datasource import IngestdDataSource  # noqa: PLC0415 - needs pyspark

    spark = _session()
    spark.dataSource.register(IngestdDataSource)
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(WARM_UPS + RUNS):
        for partitions in PARTITIONS:
            for name in ("jdbc_s", "ingestd_s"):
                began = time.perf_counter()
                if name == "jdbc_s":
                    frame = _jdbc(spark, dsn, partitions)
                else:
                    frame = _ingestd(spark, config_path, partitions)
                frame.selectExpr(*_EVERY_COLUMN).collect()
                seconds.setdefault((partitions, name), []).append(time.perf_counter() - began)
    spark.stop()
    found = {}
    for partitions in PARTITIONS:
        jdbc_s = median(seconds[partitions, "jdbc_s"][WARM_UPS:])
        ingestd_s = median(seconds[partitions, "ingestd_s"][WARM_UPS:])
        found[partitions] = {
            "jdbc_s": jdbc_s,
            "ingestd_s": ingestd_s,
            "ratio": jdbc_s / ingestd_s,
        }
    return found


def _session() -> SparkSession:
    from spark_jobs.pairs import ensure_pair  # noqa: PLC0415
    from spark_jobs.session import cached_jars, local_session  # noqa: PLC0415

    jar = Path.home() / ".m2" / "repository" / Path(*_JDBC.split(":", maxsplit=1)[0].split("."))
    jar = jar / "postgresql" / "42.7.4" / "postgresql-42.7.4.jar"
    delta = cached_jars(ensure_pair())
    settings = {"spark.driver.extraJavaOptions": ""}
    if jar.exists() and delta is not None:
        settings["spark.jars"] = ",".join(map(str, [*delta, jar]))
    else:
        settings["spark.jars.packages"] = _JDBC
    return local_session("ingestd benchmark", settings=settings)


def _ingestd(spark: SparkSession, config_path: str, partitions: int) -> DataFrame:
    options = {"config": config_path, "source": "shop", "table": "public.wide"}
    reader = spark.read.format("ingestd").options(**options)
    return reader.option("partitions", partitions).load()


def _jdbc(spark: SparkSession, dsn: str, partitions: int) -> DataFrame:
    parts = conninfo_to_dict(dsn)
    url = f"jdbc:postgresql://{parts['host']}:{parts['port']}/{parts['dbname']}"
    options = {"url": url, "driver": "org.postgresql.Driver"}
    options |= {"user": "jdbc", "password": os.environ[_PASSWORD]}
    # By default the driver reads the complete result into memory.
    reader = spark.read.format("jdbc").options(**options, fetchsize="10000")
    bounds = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(ROWS)}
    reader = reader.options(**bounds).option("numPartitions", partitions)
    return reader.option("dbtable", "public.wide").load()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run(sys.argv[1], sys.argv[2])) + "\n")
