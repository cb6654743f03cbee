# ruff: noqa: INP001 - Airflow loads it by its path
"""Airflow DAGs: mirrors and history every ten minutes, a comparison with the source every night.

They need Airflow 3 with apache-airflow-providers-apache-spark, a connection `spark_default` to the
cluster, and the image or environment of deploy/spark-submit.md there. A job's exit code 75 is a
transient error, for which Airflow retries. Exit code 1 needs an operator; the task fails after the
retries.

The capture is a daemon (deploy/ingestd.service, deploy/kubernetes). Where none may run, the DAG
`ingestd_shop_capture` captures up to now each time; unpause it. It needs ingestd on the worker.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.operators.bash import BashOperator
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
    catchup=False,  # one run processes everything that is available
    max_active_runs=1,  # one job may write to a target at a time
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
    description="Compare the mirrors of source shop with the source, row by row",
    schedule="30 2 * * *",
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=RETRIES,
    tags=["ingestd"],
):
    # Waits until the mirrors have caught up with the source, by runs of the other DAG.
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

with DAG(
    dag_id="ingestd_shop_capture",
    description="Deliver what source shop has committed, and end",
    schedule=timedelta(minutes=5),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=RETRIES,
    is_paused_upon_creation=True,
    tags=["ingestd"],
):
    BashOperator(
        task_id="capture",
        bash_command="exec ingestd run --once --config /etc/ingestd/ingestd.toml",
    )
