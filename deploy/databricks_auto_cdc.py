# ruff: noqa: INP001 - Databricks loads it by its path
"""A Databricks pipeline: tables equal to the source's, by AUTO CDC from change feeds.

`python -m spark_jobs.feed` keeps the feeds (docs/change-feeds.md). Add this file to a pipeline, and
name its feeds and keys below. `stored_as_scd_type=2` keeps every version of a row.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

FEEDS = "s3://lake/feeds"
KEYS = {"public/customers": ["id"], "public/orders": ["id"]}
FEED_COLUMNS = [
    "_cdc_operation",
    "_cdc_sequence",
    "_cdc_epoch",
    "_cdc_lsn",
    "_cdc_seq",
    "_cdc_ts",
]
"""Columns that only the feed has. Without `_cdc_ts` here, a row has the time of its last change."""


def apply_feed(path: str, keys: list[str]) -> None:
    """Define the table of a feed."""
    name = path.rpartition("/")[2]

    @dp.temporary_view(name=f"{name}_feed")
    def feed() -> DataFrame:
        spark = SparkSession.getActiveSession()
        assert spark is not None
        return spark.readStream.format("delta").load(f"{FEEDS}/{path}")

    dp.create_streaming_table(name)
    dp.create_auto_cdc_flow(
        target=name,
        source=f"{name}_feed",
        keys=keys,
        sequence_by="_cdc_sequence",
        apply_as_deletes="_cdc_operation = 'DELETE'",
        except_column_list=FEED_COLUMNS,
        stored_as_scd_type=1,
    )


for feed_path, feed_keys in KEYS.items():
    apply_feed(feed_path, feed_keys)
