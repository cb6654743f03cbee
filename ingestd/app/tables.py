"""`ingestd tables`: reads the reports of all sources."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingestd.app.factories import connector_of, lake_of, load, require_source
from ingestd.app.table_report import SourceReport, report_tables, report_to_json, require_schema
from ingestd.config import Config
from ingestd.model.errors import IngestdError


def tables(
    config_path: Path,
    sources: Sequence[str],
    *,
    schema: str | None,
    timeout_s: float,
    running: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[IngestdError]]:
    """Return the report of these sources, or of all, and its faults; see `report_to_json`.

    `running`: the daemon's /status, if it runs. Raises ConfigError for an unknown source or schema.
    """
    config = load(config_path)
    for name in sources:
        require_source(config, name)
    names = sources or list(config.sources)
    reports = asyncio.run(_tables(config, names, schema, timeout_s, running))
    if schema is not None:
        require_schema(reports, schema)
    tree = config.redactor.tree(report_to_json(reports))
    assert isinstance(tree, dict)
    return tree, [fault for report in reports.values() for fault in report.faults]


async def _tables(
    config: Config,
    sources: Sequence[str],
    schema: str | None,
    timeout_s: float,
    running: Mapping[str, Any] | None,
) -> dict[str, SourceReport]:

    async def report(name: str) -> SourceReport:
        settings = config.sources[name]
        connector, lake = (
            connector_of(config, name, settings),
            lake_of(config).sink(name),
        )
        statuses = None
        if running is not None:
            statuses = {t["table"]: t for t in running["sources"][name]["tables"]}
        try:
            return await report_tables(
                name,
                connector,
                lake,
                settings,
                schema=schema,
                running=statuses,
                timeout_s=timeout_s,
            )
        finally:
            await lake.close()
            await connector.close()

    found = await asyncio.gather(*(report(name) for name in sources))
    return dict(zip(sources, found, strict=True))
