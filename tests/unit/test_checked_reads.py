"""Spark is asked for some things in one module alone.

It reads Delta tables by `checked_tables`: other ways follow any path. Rows go to and from the
driver by `lake.exchange`: Spark 3.5 has no call for it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.harness.source_code import READS_CODE, modules, name_of, nodes, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = READS_CODE

READ_OTHERWISE = {
    "delta_log/checked_tables.py": "it is the way",
    "engine/epoch_query.py": "a stream, whose rows say which file they are of",
    "source/split_frame.py": "rows of the source, by a data source of its own",
}


def reads(source: str) -> Iterator[str]:
    """Name what a module reads Delta tables by: sessions' readers, and tables to be changed."""
    for node in nodes(source):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in {"forPath", "forName", "read", "readStream", "inputFiles"}:
            name = ast.unparse(node)
            if node.attr != "read" or name.rpartition(".")[0].endswith(("session", "spark")):
                yield f"line {node.lineno}: {name}"


def test_delta_tables_are_read_one_way() -> None:
    found = {
        name_of(path).removeprefix("spark_jobs/"): list(reads(text_of(path)))
        for path in modules("spark_jobs")
    }
    reading = {name: lines for name, lines in found.items() if lines}
    assert reading.keys() == READ_OTHERWISE.keys(), reading


EXCHANGE = {
    "lake/exchange.py": {"createDataFrame", "mapInArrow", "toArrow"},
    "engine/cuts.py": {"createDataFrame"},  # without rows
    "reconciling/report.py": {"createDataFrame"},  # of Python's own values
    "reconciling/roll_forward.py": {"createDataFrame"},  # the same
}


def newer_calls(source: str) -> set[str]:
    """Return what a module uses of pyspark that is not in all versions, or is not public."""
    names = {"createDataFrame", "fromDDL", "mapInArrow", "mapInPandas", "toArrow", "toPandas"}
    found = {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}
    imported = {node.module or "" for node in nodes(source) if isinstance(node, ast.ImportFrom)}
    private = {name for name in imported if name.startswith("pyspark.sql.pandas")}
    return (found & names) | private


def test_rows_are_exchanged_one_way() -> None:
    found = {
        name_of(path).removeprefix("spark_jobs/"): newer_calls(text_of(path))
        for path in modules("spark_jobs")
    }
    assert {name: calls for name, calls in found.items() if calls} == EXCHANGE
