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


IN_JAVA = {
    "_jdf",
    "_jsparkSession",
    "_jvm",
    "java_class",
}
ASK_JAVA = {
    "delta_log/checked_tables.py",
    "delta_log/commits.py",
    "delta_log/jvm.py",
    "delta_log/table_files.py",
    "session.py",
}
"""Besides the accelerator; the list only shrinks."""
CHOOSE = {"cli/table_job.py", "epochs.py", "reconciling/run.py"}
"""Import the accelerator: all others know its port, `delta_log/acceleration.py`."""


def test_classes_of_java_are_used_in_few_modules() -> None:
    asking, choosing = set(), set()
    for path in modules("spark_jobs"):
        name = name_of(path).removeprefix("spark_jobs/")
        if name.startswith("accelerator/"):
            continue
        found = nodes(text_of(path))
        names = {
            n.attr if isinstance(n, ast.Attribute) else n.id
            for n in found
            if isinstance(n, ast.Attribute | ast.Name)
        }
        texts = {n.value for n in found if isinstance(n, ast.Constant)}
        if IN_JAVA & (names | texts):
            asking.add(name)
        if any(
            (n.module or "").startswith("spark_jobs.accelerator")
            for n in found
            if isinstance(n, ast.ImportFrom)
        ):
            choosing.add(name)
    assert asking == ASK_JAVA
    assert choosing == CHOOSE


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
