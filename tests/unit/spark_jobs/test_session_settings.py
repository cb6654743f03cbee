"""Settings of sessions are made in two places: a job's session, and what is put back after use."""

from __future__ import annotations

import ast

from tests.harness.source_code import READS_CODE, modules, name_of, nodes, text_of

pytestmark = READS_CODE
PLACES = {
    "set": {"spark_jobs/own_session.py", "spark_jobs/delta_log/commits.py"},
    "unset": {"spark_jobs/own_session.py", "spark_jobs/delta_log/commits.py"},
    "newSession": {"spark_jobs/own_session.py"},
}


def calls(source: str) -> set[str]:
    """Return which of PLACES' methods a module calls: of a session's `conf`, or of a session."""
    found = {
        node.func
        for node in nodes(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    of_conf = {
        name.attr
        for name in found
        if isinstance(name.value, (ast.Attribute, ast.Name))
        and ast.unparse(name.value).rpartition(".")[2] == "conf"
    }
    return (of_conf & {"set", "unset"}) | ({name.attr for name in found} & {"newSession"})


def test_sessions_are_set_in_two_places() -> None:
    found: dict[str, set[str]] = {name: set() for name in PLACES}
    for path in modules("spark_jobs"):
        for name in calls(text_of(path)):
            found[name].add(name_of(path))
    assert found == PLACES


def test_a_setting_made_elsewhere_is_found() -> None:
    assert calls("def f(self): self.session.conf.set('a', 'b')") == {"set"}
    assert calls("conf.unset('a'); s.newSession(); event.set()") == {"unset", "newSession"}
