# ruff: noqa: INP001 - Dagster loads it by its path, and reads its annotations
"""Dagster assets: the raw tables of source shop, brought up to now by each run.

They need dagster 1.13 and ingestd in one environment, and a config whose `[http] listen` no other
process has. Two runs at the same time do no harm: the second one ends with the reason
``claimed``, and can be retried.
"""

import asyncio
import os

import dagster as dg

from ingestd import Capture
from ingestd.model.errors import TransientError

CONFIG = os.environ.get("INGESTD_CONFIG", "/etc/ingestd/ingestd.toml")


@dg.asset(description="The change logs of all captured tables, up to the time of the run")
def raw_tables(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    """Deliver what has been committed; the run shows the rows of each table."""
    rows: dict[str, int] = {}

    async def capture_up_to_now() -> None:
        async with Capture(CONFIG, once=True) as capture:
            async for epoch in capture:
                context.log.info("%s: epoch %d is durable", epoch.source, epoch.number)
                for table, count in epoch.rows.items():
                    rows[f"{epoch.source}/{table}"] = rows.get(f"{epoch.source}/{table}", 0) + count

    try:
        asyncio.run(capture_up_to_now())
    except TransientError as error:
        raise dg.RetryRequested(max_retries=2, seconds_to_wait=60) from error
    return dg.MaterializeResult(metadata=dict(rows))


defs = dg.Definitions(
    assets=[raw_tables],
    schedules=[
        dg.ScheduleDefinition(
            "every_ten_minutes", cron_schedule="*/10 * * * *", target="raw_tables"
        )
    ],
)
