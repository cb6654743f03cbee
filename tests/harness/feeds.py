"""A plain consumer of change feeds, which keeps the newest row per key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_jobs.feed import main
from spark_jobs.lake.targets import table_path
from tests.harness.plain_delta import read_delta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = dict[str, Any]


class Feeds:
    """The feeds of a lake below `target`, and the job that appends to them."""

    def __init__(self, lake: Path, target: Path, source: str = "shop") -> None:
        self.target = target
        self.arguments = ["--lake", str(lake), "--source", source, "--target", str(target)]

    def run(self, *more: str, after_commit: Callable[[str], None] = lambda _: None) -> int:
        """Run the job up to the last epoch; return its exit code."""
        return main([*self.arguments, "--once", *more], after_commit=after_commit)

    def path(self, table: str) -> Path:
        return Path(table_path(str(self.target), table))

    def rows(self, table: str) -> list[Row]:
        """Return all rows of a feed, by sequence. They are read without Spark.

        Asserts that commits only added files, and that each has higher sequences than the last.
        """
        path = self.path(table)
        entries = sorted((path / "_delta_log").glob("[0-9]*.json"))
        for entry in entries:
            assert not any('"remove"' in line for line in entry.read_text().splitlines())
        found: list[Row] = []
        for version in range(len(entries)):
            rows = read_delta(path, version)
            known = {row["_cdc_sequence"] for row in found}
            new = [row for row in rows if row["_cdc_sequence"] not in known]
            if found and new:
                highest = max(known)
                assert min(row["_cdc_sequence"] for row in new) > highest
            assert len(rows) >= len(found)
            found = rows
        return sorted(found, key=lambda row: row["_cdc_sequence"])


def apply_changes(rows: Sequence[Row], key: Sequence[str], until: int | None = None) -> list[Row]:
    """Return the rows that a consumer has, from the rows of a feed up to an epoch, by sequence.

    Asserts that what is inserted was absent, and what is updated or deleted was there.
    """
    current: dict[str, Row] = {}
    for row in rows:
        if until is not None and row["_cdc_epoch"] > until:
            continue
        raw = dict(row["_cdc_raw"] or ())
        name = json.dumps([raw.get(n, row[n]) for n in key], default=str)
        operation = row["_cdc_operation"]
        assert (operation == "INSERT") == (name not in current), (operation, name)
        if operation == "DELETE":
            del current[name]
            others = [n for n in row if not n.startswith("_cdc_") and n not in key]
            assert all(row[n] is None for n in others)
        else:
            current[name] = row
    return list(current.values())
