from __future__ import annotations

import re

from tests.harness.attacks import ATTACKERS, LISTED, ROOT, report_lines


class Report:
    def __init__(self, nodeid: str, *attackers: str) -> None:
        self.nodeid = nodeid
        self.user_properties = [("attacker", attacker) for attacker in attackers]


def test_what_is_listed_exists() -> None:
    assert LISTED.keys() <= ATTACKERS.keys()
    for place in {place for places in LISTED.values() for place in places}:
        path, _, name = place.partition("::")
        text = (ROOT / path).read_text("utf-8")
        assert re.search(rf"def {name}" if name else "def test_", text), place


def test_the_report_has_every_attacker_and_names_what_was_gained() -> None:
    found = [("passed", Report("a::b", "user", "server")), ("failed", Report("a::c", "server"))]
    found += [("skipped", Report("a::d", "account"))]
    lines = list(report_lines(found))  # type: ignore[arg-type]
    assert len(lines) == len(ATTACKERS) + 1
    by_words = {words: [x for x in lines if x.startswith(words)] for words in ATTACKERS.values()}
    [user] = by_words[ATTACKERS["user"]]
    assert user.endswith("    1 held")
    [server] = by_words[ATTACKERS["server"]]
    assert "1 held   1 NOT held" in server
    assert lines[lines.index(server) + 1].strip() == "a::c"
    [account] = by_words[ATTACKERS["account"]]
    assert "NOT TRIED, 1 skipped" in account
