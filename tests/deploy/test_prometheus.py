"""Alerts and dashboard: by promtool, and by a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from ingestd.cli import app
from ingestd.testing.embedded.ports import free_port
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "ingestd.rules.yml").read_text())["groups"][0]["rules"]
ALERTS = [rule["alert"] for rule in RULES]
CASES = yaml.safe_load((FOLDER / "ingestd.tests.yml").read_text())["tests"]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "ingestd.json").read_text())
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
LIMIT_S = 60
SCRAPE = "1s"
TOKEN = "scraped-by-prometheus-0123456789"
METRIC = re.compile(r"\b(?:ingestd|process)_[a-z_]+\b")
IN_THE_END = {"_bucket", "_count", "_sum", "_total"}
VARIABLES = {"$job": ".*", "$source": ".*", "$__rate_interval": "1m"}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"no {name}: run .ci/run once as root, or apt-get install prometheus")
    return found


def dashboard_queries() -> list[str]:
    return [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", ())]


def test_promtool_holds_every_rule_against_its_cases() -> None:
    run = subprocess.run(
        [program("promtool"), "test", "rules", "ingestd.tests.yml"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SUCCESS" in run.stdout + run.stderr


def test_every_alert_has_a_case_in_which_it_is_raised() -> None:
    raised = {
        case["alertname"]
        for test in CASES
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert raised == set(ALERTS)


def test_every_alert_has_exactly_one_section_in_the_runbook() -> None:
    headings = re.findall(r"^## (Ingestd\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
    for rule in RULES:
        link = rule["annotations"]["runbook_url"]
        assert link == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_the_runbook_names_commands_that_exist() -> None:
    commands = set(re.findall(r"ingestd (\w+) (?:-c|SOURCE|--)", RUNBOOK))
    assert {"status", "check", "snapshot", "verify", "tables"} <= commands
    there = get_command(app)
    assert isinstance(there, TyperGroup)
    assert commands <= set(there.commands)


def test_dashboard_panels_do_not_overlap_and_have_unique_ids() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes a daemon."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """Data of an answer of its API; None while it does not listen."""
        try:
            with urlopen(f"{self.url}{path}?{urlencode(parameters)}", timeout=10) as answer:
                body = json.load(answer)
        except URLError:
            return None
        assert body["status"] == "success", body
        return body["data"]

    def targets(self) -> list[tuple[str, str]]:
        """Health and last error of what is scraped."""
        found = self.ask("/api/v1/targets") or {"activeTargets": []}
        return [(t["health"], t["lastError"]) for t in found["activeTargets"]]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found = self.ask("/api/v1/query", query=expression)
        return [] if found is None else list(found["result"])


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with rules and config of `deploy/`, but for times, target and token."""
    folder.mkdir()
    shutil.copy(FOLDER / "ingestd.rules.yml", folder)
    text = (FOLDER / "prometheus.yml").read_text()
    config = yaml.safe_load(text.replace("# authorization", "authorization").replace("15s", SCRAPE))
    job = config["scrape_configs"][0]
    job["static_configs"][0]["targets"] = [target]
    job["authorization"]["credentials_file"] = "token"
    (folder / "token").write_text(TOKEN)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address={address}",
            ],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def names_of(expression: str) -> set[str]:
    return set(METRIC.findall(expression))


@pytest.mark.thorough
def test_a_real_prometheus_evaluates_every_alert_and_panel(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    database = workload_database
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        source_extra=f'slot = "{database.name}"\npublication = "{database.name}"',
    )
    daemon = make_daemon(config)
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[http]\n", f'[http]\ntoken = "{TOKEN}"\n'))
    daemon.start()
    with scraping(str(daemon.listen), tmp_path / "prometheus") as prometheus:
        await_until(
            lambda: prometheus.query('ingestd_source_state{state="streaming"} == 1'),
            LIMIT_S,
            lambda: f"a source that streams: {prometheus.targets()}\n{daemon.tail()}",
        )
        with Workload(database.dsn, seed=1, transactions=40) as workload:
            workload.join()
        await_until(
            lambda: prometheus.query("ingestd_transactions_total > 0"),
            LIMIT_S,
            lambda: f"a scrape after a transaction is durable\n{daemon.tail()}",
        )
        assert [s["value"][1] for s in prometheus.query("up")] == ["1"]

        there = {
            s["__name__"] for s in prometheus.ask("/api/v1/series", **{"match[]": "{job!=''}"})
        }
        described = set(prometheus.ask("/api/v1/metadata"))
        for expression in [rule["expr"] for rule in RULES] + dashboard_queries():
            for name in names_of(expression) - there:
                # no such event yet: it is described all the same
                assert name.removesuffix("_total") in described or name in described, name

        for panel_query in dashboard_queries():
            told = panel_query
            for variable, value in VARIABLES.items():
                told = told.replace(variable, value)
            assert "$" not in told
            prometheus.ask("/api/v1/query", query=told)  # an error is none of "success"
        assert prometheus.query(
            dashboard_queries()[0].replace("$job", ".*").replace("$source", ".*")
        )

        def evaluated() -> list[dict[str, Any]] | None:
            [group] = prometheus.ask("/api/v1/rules")["groups"]
            rules: list[dict[str, Any]] = group["rules"]
            return rules if all(rule["health"] != "unknown" for rule in rules) else None

        rules = await_until(evaluated, LIMIT_S, "every rule to be evaluated")
        assert {r["name"]: (r["health"], r.get("lastError")) for r in rules} == dict.fromkeys(
            ALERTS, ("ok", None)
        )
        # a daemon that delivers raises nothing, with the server's NaN for a slot without limit
        assert [s["value"][1] for s in prometheus.query("ingestd_slot_safe_bytes")] == ["NaN"]
        assert prometheus.query("ALERTS") == []

        daemon.sigkill()
        await_until(
            lambda: (
                [s["metric"]["alertname"] for s in prometheus.query("ALERTS")] == ["IngestdDown"]
            ),
            LIMIT_S,
            "the alert to be pending",
        )
