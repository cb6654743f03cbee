# ruff: noqa: INP001 - spark-pipelines loads it by its path
"""The table `orders`, equal to the source's, from its change feed.

Each run computes it from the complete feed. AUTO CDC, which merges only what is new, is in Spark
from 4.2 on, but refuses Delta as a target. Where it does not::

    dp.create_streaming_table("orders", format=...)
    dp.create_auto_cdc_flow(
        target="orders", source="orders_feed", keys=["id"], sequence_by="_cdc_sequence",
        apply_as_deletes="_cdc_operation = 'DELETE'", except_column_list=FEED_COLUMNS,
    )
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

FEED = "/var/lib/ingestd/feeds/public/orders"
KEY = ["id"]
FEED_COLUMNS = [
    "_cdc_operation",
    "_cdc_sequence",
    "_cdc_epoch",
    "_cdc_lsn",
    "_cdc_seq",
    "_cdc_ts",
]


@dp.materialized_view(format="delta")
def orders() -> DataFrame:
    """Return the newest row of each key, without deletions."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    feed = spark.read.format("delta").load(FEED)
    newest = feed.groupBy(*KEY).agg(f.max_by(f.struct("*"), "_cdc_sequence").alias("newest"))
    rows = newest.select("newest.*").where("_cdc_operation <> 'DELETE'")
    return rows.drop(*FEED_COLUMNS)
