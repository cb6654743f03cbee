"""Marks the tests that attack with their attackers in SECURITY.md, and reports by attacker.

A test is marked, ``@pytest.mark.attack("account")``, or listed here, by file or by file and name.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
ATTACKERS = {
    "user": "a database user without rights",
    "table owner": "the owner of a captured table",
    "database owner": "the owner of the database, or of a schema in the path",
    "account": "another account on the host",
    "lake writer": "who may write the lake",
    "server": "a lying server, or who answers in its place",
    "reader": "a reader of the page, of the log, or who reaches the port",
    "supply chain": "the supply chain",
}
LISTED = {
    "user": (
        "faults/test_takeover.py::test_one_writer_a_stranger_keeps_no_daemon_from_its_source",
        "faults/test_two_daemons.py::test_one_writer_of_two_that_poll_as_roles_that_see_no_lock",
        "integration/test_least_privilege.py",
    ),
    "table owner": (
        "integration/test_quoting.py",
        "integration/test_odd_names.py",
        "integration/test_names.py",
        "integration/test_large_rows.py",
        "unit/test_sql_is_composed.py",
        "unit/terminal/test_printed_text.py",
    ),
    "database owner": (
        "integration/test_hostile_schema.py",
        "integration/test_pinned_settings.py",
    ),
    "account": (
        "integration/test_snapshot_keeper.py",
        "integration/test_umask.py",
        "unit/test_files_are_created.py",
    ),
    "lake writer": (
        "faults/test_damaged_kinds.py",
        "faults/test_damaged_references.py",
        "faults/test_damaged_tables.py",
    ),
    "server": (
        "fuzz/test_fuzz.py",
        "integration/test_lying_server.py",
        "integration/test_tls.py",
        "unit/postgres/connection/test_errors.py",
        "unit/postgres/connection/test_server_messages.py",
        "unit/postgres/connection/test_tls.py",
        "unit/decode/test_sanitized.py",
    ),
    "reader": (
        "integration/test_nothing_is_told.py",
        "unit/http/test_commands.py",
        "unit/http/test_connections.py",
        "unit/http/test_server.py",
        "unit/http/test_auth.py",
        "unit/config/test_redaction.py",
    ),
}
_PROPERTY = "attacker"


def mark_attacks(items: Iterable[pytest.Item]) -> None:
    """Mark the listed tests. Each test then records its attackers in its report."""
    for item in items:
        found = {
            attacker
            for attacker, place in _listed_in(item.path)
            if item.name.startswith(place.partition("::")[2])
        }
        if found:
            item.add_marker(pytest.mark.attack(*sorted(found)))
        for attacker in attackers_of(item):
            item.user_properties.append((_PROPERTY, attacker))


@cache
def _listed_in(path: Path) -> list[tuple[str, str]]:
    """Return what `LISTED` has of a file: attacker and place."""
    file = path.relative_to(ROOT).as_posix()
    return [
        (attacker, place)
        for attacker, places in LISTED.items()
        for place in places
        if place.partition("::")[0] == file
    ]


def attackers_of(item: pytest.Item) -> set[str]:
    """Return the attackers of a test. Raises UsageError for one that is not in SECURITY.md."""
    marks = list(item.iter_markers("attack"))
    found = {str(attacker) for mark in marks for attacker in mark.args}
    if (marks and not found) or not found <= ATTACKERS.keys():
        raise pytest.UsageError(f"{item.nodeid}: mark it attack(...) with some of {[*ATTACKERS]}")
    return found


def report_lines(reports: Iterable[tuple[str, pytest.TestReport]]) -> Iterator[str]:
    """Yield, for each attacker, how many attacks were held off and which were not.

    `reports`: each with its outcome.
    """
    counts: dict[str, Counter[str]] = {attacker: Counter() for attacker in ATTACKERS}
    gained: dict[str, list[str]] = {attacker: [] for attacker in ATTACKERS}
    for outcome, report in reports:
        for name, attacker in report.user_properties:
            if name == _PROPERTY:
                counts[str(attacker)][outcome] += 1
                if outcome in {"failed", "error"}:
                    gained[str(attacker)].append(report.nodeid)
    width = max(map(len, ATTACKERS.values()))
    for attacker, words in ATTACKERS.items():
        held, skipped = counts[attacker]["passed"], counts[attacker]["skipped"]
        failed = len(gained[attacker])
        said = f"{held:5} held {failed:3} NOT held" if failed else f"{held:5} held"
        if not held and not failed:
            said = "    0 NOT TRIED"
        yield f"{words:{width}} {said}" + (f", {skipped} skipped" if skipped else "")
        yield from (f"{'':{width}}       {nodeid}" for nodeid in gained[attacker])
