"""Checks the versions of raw tables in `_epochs` against the tables' own logs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from ingestd.lake.delta.commit import parse_commit
from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from tests.harness.compare import epochs


@dataclass(frozen=True, slots=True)
class Added:
    """Rows of one epoch that a version added."""

    version: int
    epoch: int
    rows: int


def added_rows(lake: Path | str, folder: str) -> list[Added]:
    """Return the rows added according to a local table's complete log, without moved rows."""
    found = []
    for path in sorted((Path(lake) / folder / "_delta_log").glob("*.json")):
        for added in parse_commit(path.read_bytes(), str(path)).added():
            if not added.is_change:
                continue
            statistics = json.loads(added.statistics_json or "")
            low, high = (statistics[k]["_cdc_epoch"] for k in ("minValues", "maxValues"))
            assert low == high, f"{folder}: {added.path} has rows of several epochs"
            found.append(Added(int(path.stem), low, statistics["numRecords"]))
    return found


def assert_epoch_versions(lake: Path | str, source: str = "shop") -> None:
    """Assert that `version` has the table's rows up to an epoch only, and `rows` the epoch's count.

    The log must have all its commits. Rows of the epoch that is still open are ignored.
    """
    layout = Layout(source)
    told: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    closed = 0
    for row in epochs(lake, source):
        closed = row["epoch"]
        for entry in row["tables"]:
            told[entry["table"]].append((row["epoch"], entry["version"], entry["rows"]))
    for table, entries in told.items():
        added = added_rows(lake, layout.raw(TableId.parse(table)))
        rows: Counter[int] = Counter()
        for part in added:
            rows[part.epoch] += part.rows
        for epoch, version, count in entries:
            assert rows[epoch] == count, f"{table}: epoch {epoch} has {rows[epoch]}, not {count}"
            wrong = [a for a in added if (a.version <= version) != (a.epoch <= epoch)]
            assert not wrong, f"{table}: version {version} is not that of epoch {epoch}: {wrong[0]}"
        listed = {epoch for epoch, _, _ in entries}
        unlisted = {epoch for epoch in rows if epoch <= closed} - listed
        assert not unlisted, f"{table}: has rows of epochs that do not list it: {unlisted}"
