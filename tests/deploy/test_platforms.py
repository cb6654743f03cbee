"""Job definitions for managed platforms: their form, and what they pass to the jobs.

No platform can be run here. AWS' own models and Databricks' own classes check the definitions.
"""

from __future__ import annotations

import importlib
import json
import runpy
import tomllib
from typing import TYPE_CHECKING, Any

import botocore.session
import pytest
import yaml
from botocore.validate import validate_parameters
from databricks.bundles.jobs import Job

from ingestd import __version__
from tests.harness.clusters import ENTRY, ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

DEPLOY = ROOT / "deploy"
PAGES = {
    "databricks": "databricks_job.yml",
    "emr": "emr_serverless.json",
    "fabric": "fabric_notebook.py",
    "glue": "glue_job.json",
}
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "scripts"
]
entry = runpy.run_path(str(ENTRY))["job_and_arguments"]


def accept(job: str, arguments: Sequence[str]) -> None:
    """Have the job's own parser read its arguments; it exits where it can't."""
    importlib.import_module(f"spark_jobs.{job}").parser().parse_args(list(arguments))


def load(name: str) -> Any:
    text = (DEPLOY / name).read_text("utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def ensure_form(service: str, operation: str, parameters: dict[str, Any]) -> None:
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    validate_parameters(parameters, shape)
    unknown = set(parameters) - set(shape.members)
    assert not unknown


def test_databricks_tasks_are_what_the_jobs_take() -> None:
    bundle = load("databricks_job.yml")
    assert set(bundle) == {"bundle", "resources"}
    seen = []
    for given in bundle["resources"]["jobs"].values():
        assert Job.from_dict(given).as_dict()["tasks"]  # (it refuses unknown fields)
        clusters = {cluster["job_cluster_key"] for cluster in given["job_clusters"]}
        for task in given["tasks"]:
            wheel = task["python_wheel_task"]
            assert wheel["package_name"] == "ingestd"
            module, _, function = SCRIPTS[wheel["entry_point"]].partition(":")
            assert callable(getattr(importlib.import_module(module), function))
            accept(module.removeprefix("spark_jobs."), wheel["parameters"])
            assert task["job_cluster_key"] in clusters
            seen.append(wheel["entry_point"])
    assert seen == ["ingestd-backfill", "ingestd-mirror", "ingestd-history"]


def test_databricks_form_is_checked() -> None:
    given = load("databricks_job.yml")["resources"]["jobs"]["ingestd_mirror"]
    given["tasks"][0]["python_wheel_task"]["entrypoint"] = "x"
    with pytest.raises(ValueError, match="entrypoint"):
        Job.from_dict(given)


def test_emr_serverless_run_is_what_the_job_takes() -> None:
    run = load("emr_serverless.json")
    ensure_form("emr-serverless", "StartJobRun", run)
    submit = run["jobDriver"]["sparkSubmit"]
    assert submit["entryPoint"].endswith(f"/{ENTRY.name}")
    accept(*entry(submit["entryPointArguments"]))
    words = submit["sparkSubmitParameters"].split()
    assert set(words[::2]) == {"--conf"}
    assert all("=" in word for word in words[1::2])


def test_glue_job_is_what_the_job_takes() -> None:
    job = load("glue_job.json")
    ensure_form("glue", "CreateJob", job)
    assert job["Command"]["ScriptLocation"].endswith(f"/{ENTRY.name}")
    arguments = job["DefaultArguments"]
    # as Glue calls the script: with other arguments around
    words = [word for pair in arguments.items() for word in pair]
    accept(*entry(["--JOB_NAME", "x", *words, "--TempDir", "s3://t"]))
    wheel, pandas = arguments["--additional-python-modules"].split(",")
    assert f"/ingestd-{__version__}-" in wheel
    assert pandas.startswith("pandas>=2")


@pytest.mark.parametrize("words", [[], ["mirrors"], ["--ingestd_arguments"], ["--lake", "x"]])
def test_entry_without_a_job_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry(words)
    assert ended.value.code == 2
    assert "backfill, feed, history, mirror, reconcile" in capsys.readouterr().err


@pytest.mark.parametrize("platform", PAGES)
def test_page_says_what_was_tried_and_names_its_definition(platform: str) -> None:
    text = (ROOT / "docs" / "platforms" / f"{platform}.md").read_text("utf-8")
    assert "**Tried here:**" in text
    assert "**Not tried:**" in text
    assert f"](../../deploy/{PAGES[platform]})" in text
