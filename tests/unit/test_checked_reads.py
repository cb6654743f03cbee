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
    "accelerator/class_tables.py": "they are the way",
    "delta_log/checked_tables.py": "names of columns, from the log",
    "delta_log/sql_tables.py": "they are the way",
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


IN_JAVA = {"_jdf", "_jsparkSession", "_jvm", "_sc", "_gateway", "java_class"}
NOT_PUBLIC = ("py4j", "delta")
"""Packages that a client of Spark Connect lacks, or where they fail."""
ASK_JAVA = {
    "session.py": "settings of a JVM's log, and the version of its Delta",
    "delta_log/faults.py": "the class of py4j's errors, if there is one",
}
"""Besides the accelerator."""
CHOOSE = {
    "cli/table_job.py",
    "epochs.py",
    "histories/views.py",
    "reconciling/run.py",
    "session.py",
}
"""Import the accelerator: all others know its port, `delta_log/acceleration.py`."""


def test_all_but_the_accelerator_is_public() -> None:
    """Neither Delta's Python package, nor py4j, nor the JVM behind a session."""
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
        imported = {n.module or "" for n in found if isinstance(n, ast.ImportFrom)}
        imported |= {alias.name for n in found if isinstance(n, ast.Import) for alias in n.names}
        if IN_JAVA & (names | texts) or {i.split(".")[0] for i in imported} & set(NOT_PUBLIC):
            asking.add(name)
        if any(i.startswith("spark_jobs.accelerator") for i in imported):
            choosing.add(name)
    assert asking == ASK_JAVA.keys()
    assert choosing == CHOOSE


EXCHANGE = {
    "lake/exchange.py": {"createDataFrame", "mapInArrow", "toArrow"},
    "source/split_frame.py": {"mapInArrow"},  # tasks' own rows, which no driver has
    "source/table_read.py": {"mapInArrow"},  # the same
    "reconciling/report.py": {"createDataFrame"},  # of Python's own values
    "reconciling/roll_forward.py": {"createDataFrame"},  # the same
    "own_session.py": {"createDataFrame"},  # of no rows
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


def may_add_none(source: str) -> list[int]:
    """Return the lines where `withColumns` is given what may be empty: no key is written out."""
    return [
        node.lineno
        for node in nodes(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "withColumns"
        and not (isinstance(node.args[0], ast.Dict) and any(node.args[0].keys))
    ]


def test_columns_that_may_be_none_are_added_one_way() -> None:
    """Spark Connect takes at least one: `lake.columns.with_columns` adds none, too."""
    assert may_add_none("rows.withColumns({n: x for n in names})") == [1]
    assert may_add_none("rows.withColumns({**some, 'a': x})") == []
    found = {name_of(path): may_add_none(text_of(path)) for path in modules("spark_jobs")}
    assert [name for name, lines in found.items() if lines] == ["spark_jobs/lake/columns.py"]
