"""What `deploy/` shows for Spark can be used as it stands."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_jobs.epochs import latest
from spark_jobs.lake.targets import MIRRORS, table_path
from spark_jobs.pairs import NEWEST
from tests.harness.clusters import ORDERS
from tests.harness.plain_mirror import MIRROR
from tests.harness.raw_lake import RawLake

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
IMAGE = "/opt/ingestd/"
"""Where the image of spark-submit.md has the checkout."""


def parse(script: str, arguments: Sequence[str]) -> None:
    """Have the job's own parser read its arguments; it exits where it can't."""
    path = ROOT / script.removeprefix(IMAGE)
    assert path.is_file(), script
    job = importlib.import_module(f"spark_jobs.{path.stem}")
    job.parser().parse_args(list(arguments))


def commands(text: str) -> Iterator[list[str]]:
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line)


def test_submitted_commands_are_what_the_jobs_take() -> None:
    text = (DEPLOY / "spark-submit.md").read_text(encoding="utf-8")
    seen = set()
    for command in commands(text):
        if command[:2] == ["python", "-m"]:
            script, rest = command[2].replace(".", "/") + ".py", command[3:]
        else:
            assert command[0] == "spark-submit"
            place = next(i for i, word in enumerate(command) if word.endswith(".py"))
            script, rest = command[place], command[place + 1 :]
            assert NEWEST.package in command[command.index("--packages") + 1]
        parse(script, rest)
        seen.add(Path(script).stem)
    assert seen == {"mirror", "history", "feed", "backfill", "reconcile"}
    assert f"apache/spark:{NEWEST.spark}." in text
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (DEPLOY / link.partition("#")[0]).exists(), link


def test_kubernetes_manifests_are_what_the_jobs_take(spark: SparkSession) -> None:
    """Read by the YAML library of Java that Kubernetes clients use: Spark brings it along."""
    jvm: Any = spark._jvm  # noqa: SLF001 - Spark's
    jackson = jvm.com.fasterxml.jackson
    mapper = jackson.databind.ObjectMapper(jackson.dataformat.yaml.YAMLFactory())
    text = (DEPLOY / "sparkapplication.yaml").read_text(encoding="utf-8")
    documents = [json.loads(str(mapper.readTree(part))) for part in text.split("\n---\n")[1:]]
    assert [d["kind"] for d in documents] == ["SparkApplication", "ScheduledSparkApplication"]
    for document in documents:
        assert document["apiVersion"] == "sparkoperator.k8s.io/v1beta2"
        spec = document["spec"].get("template", document["spec"])
        parse(spec["mainApplicationFile"].removeprefix("local://"), spec["arguments"])
        assert spec["type"] == "Python"
        assert spec["mode"] == "cluster"
        assert spec["sparkVersion"].startswith(f"{NEWEST.spark}.")
        assert NEWEST.package in spec["deps"]["packages"]
        assert all(isinstance(value, str) for value in spec["sparkConf"].values())
        names = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = spec["driver"].get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} == names
        config = [a for a in spec["arguments"] if a.startswith("--config=")]
        assert all(a.startswith(f"--config={mounts[0]['mountPath']}/") for a in config)


@dataclass
class Dag:
    dag_id: str
    tasks: list[Operator] = field(default_factory=list)

    def __enter__(self) -> Self:
        _OPEN.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.pop()


class Operator:
    def __init__(self, task_id: str, application: str, **more: Any) -> None:
        self.task_id, self.application, self.more = task_id, application, more
        self.after: list[str] = []
        _OPEN[-1].tasks.append(self)

    def __rshift__(self, other: Operator) -> Operator:
        other.after.append(self.task_id)
        return other


class BashTask(Operator):
    def __init__(self, *, task_id: str, bash_command: str) -> None:
        super().__init__(task_id=task_id, application=bash_command)


_OPEN: list[Dag] = []


def test_airflow_dags_are_what_the_jobs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow is not installed: stand-ins receive its arguments."""
    made: list[Dag] = []

    def dag(*, dag_id: str, schedule: Any, start_date: datetime, **more: Any) -> Dag:
        assert start_date.tzinfo is not None
        assert schedule
        known = {"description", "catchup", "max_active_runs", "default_args", "tags"}
        assert set(more) <= {*known, "is_paused_upon_creation"}
        made.append(Dag(dag_id))
        return made[-1]

    spark = "airflow.providers.apache.spark.operators.spark_submit"
    bash = "airflow.providers.standard.operators.bash"
    for whole in (spark, bash, "airflow.sdk"):
        parts = whole.split(".")
        for name in [".".join(parts[: i + 1]) for i in range(len(parts))]:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[bash], "BashOperator", BashTask, raising=False)
    monkeypatch.setattr(sys.modules[spark], "SparkSubmitOperator", Operator, raising=False)
    monkeypatch.setattr(sys.modules["airflow.sdk"], "DAG", dag, raising=False)
    runpy.run_path(str(DEPLOY / "airflow_dag.py"))
    assert {d.dag_id: [t.task_id for t in d.tasks] for d in made} == {
        "ingestd_shop_mirror": ["mirror", "history"],
        "ingestd_shop_reconcile": ["reconcile"],
        "ingestd_shop_capture": ["capture"],
    }
    *made, capturing = made
    assert capturing.tasks[0].application.startswith("exec ingestd run --once --config ")
    assert made[0].tasks[1].after == ["mirror"]
    for task in [t for d in made for t in d.tasks]:
        parse(task.application, task.more["application_args"])
        assert NEWEST.package in task.more["packages"]


def test_notebook_is_valid_and_holds_no_output() -> None:
    notebook = read_notebook()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        own = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | own
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", cell["id"])


def test_notebook_draws_the_freshness_of_a_mirror(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del spark  # the notebook's own, found running
    target = tmp_path / "mirror"
    orders = pa.table({"id": [1, 2], "_cdc_lsn": [1, 1], "_cdc_seq": [0, 0]})
    write_deltalake(table_path(str(target), "public.orders"), orders)
    now = datetime.now(UTC)
    cuts = [
        {
            "epoch": epoch,
            "end_lsn": epoch * 100,
            "last_commit_ts": now - timedelta(seconds=60 - epoch),
            "mirrored_at": now - timedelta(seconds=60 - 3 * epoch),
            "tables": [{"table": "public.orders", "version": 0, "schema_version": 1}],
        }
        for epoch in (1, 2, 4)
    ]
    write_deltalake(f"{target}/{MIRRORS}", pa.Table.from_pylist(cuts, MIRROR))
    monkeypatch.setenv("INGESTD_TARGET", str(target))
    shown = run_cells(read_notebook())
    assert shown["cuts"][-1] == "epoch 4: 1 tables, 8.0 s"
    assert (shown["figures"]["cuts"], round(shown["figures"]["median_s"])) == (3, 4)
    assert 50 < shown["figures"]["newest_transaction_s_ago"] < 600
    picture = shown["chart"]._repr_svg_()
    assert picture.count("<circle") == 3
    assert "worst 8.0 s" in picture
    assert shown["tables"] == {"public.orders": 2}


def test_fabric_notebook_runs_in_the_notebooks_session(spark: SparkSession, tmp_path: Path) -> None:
    """The lake is a folder; Fabric's own storage and session can't be had here."""
    raw = RawLake(tmp_path / "raw")
    at = {"_cdc_op": "c", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}
    raw.commit({ORDERS: [{**at, "id": 7, "note": "seven"}]})
    raw.record("live", ORDERS)
    text = (DEPLOY / "fabric_notebook.py").read_text(encoding="utf-8")
    changed, count = re.subn(r'LAKE = ".*"', f'LAKE = "{tmp_path}"', text)
    assert count == 1
    exec(compile(changed, "fabric_notebook.py", "exec"), {})
    [row] = latest(spark, str(tmp_path / "mirror"))["public.orders"].collect()
    assert (row["id"], row["note"]) == (7, "seven")
    [version] = spark.read.format("delta").load(f"{tmp_path}/history/public/orders").collect()
    assert (version["id"], version["is_current"]) == (7, True)


def read_notebook() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "freshness.ipynb").read_text(encoding="utf-8"))
    return found


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells as Jupyter does: what each one's last expression is, by its id."""
    names: dict[str, Any] = {}
    shown = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), cell["id"])
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, cell["id"], "exec"), names)
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), cell["id"], "eval")
            shown[cell["id"]] = eval(expression, names)
    return shown
