# ruff: noqa: INP001 - Airflow loads it by its path
"""Airflow: mirrors every ten minutes, history after them, held against the source every night.

Airflow 3 with apache-airflow-providers-apache-spark; a connection `spark_default` to the cluster;
the image or environment of deploy/spark-submit.md on it. A job's exit code 75 is a transient fault:
Airflow's retries are for that. 1 is for a person, and fails the task after the retries, too.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG

JOBS = "/opt/ingestd/spark_jobs"
LAKE = ["--lake", "s3://lake/raw", "--source", "shop"]
SPARK = {
    "conn_id": "spark_default",
    "packages": "io.delta:delta-spark_4.2_2.13:4.4.0,org.apache.hadoop:hadoop-aws:3.4.2",
    "conf": {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "16"},
}
START = datetime(2026, 1, 1, tzinfo=UTC)
RETRIES = {"retries": 2, "retry_delay": timedelta(minutes=1)}

with DAG(
    dag_id="ingestd_shop_mirror",
    description="Move the mirrors and histories of source shop to the lake's last epoch",
    schedule=timedelta(minutes=10),
    start_date=START,
    catchup=False,  # a run takes all there is
    max_active_runs=1,  # a second one would find the checkpoint in use
    default_args=RETRIES,
    tags=["ingestd"],
):
    mirror = SparkSubmitOperator(
        task_id="mirror",
        application=f"{JOBS}/mirror.py",
        application_args=[*LAKE, "--target", "s3://lake/mirror", "--once"],
        **SPARK,
    )
    history = SparkSubmitOperator(
        task_id="history",
        application=f"{JOBS}/history.py",
        application_args=[*LAKE, "--target", "s3://lake/history", "--once"],
        **SPARK,
    )
    mirror >> history

with DAG(
    dag_id="ingestd_shop_reconcile",
    description="Hold the mirrors of source shop against the source, row by row",
    schedule="30 2 * * *",
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=RETRIES,
    tags=["ingestd"],
):
    # It waits for the mirrors to reach the source: runs of the other DAG bring them there.
    SparkSubmitOperator(
        task_id="reconcile",
        application=f"{JOBS}/reconcile.py",
        application_args=[
            *("--config", "/etc/ingestd/ingestd.toml", "--source", "shop"),
            *("--target", "s3://lake/mirror", "--report", "s3://lake/reconcile"),
            *("--wait", "30m"),
        ],
        execution_timeout=timedelta(hours=4),
        **SPARK,
    )
