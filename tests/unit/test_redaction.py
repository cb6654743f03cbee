"""Nothing secret gets through the redactor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.positions import Lsn
from ingestd.redaction import MASK, Redactor


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host=db password=hunter2 dbname=x", "host=db password=*** dbname=x"),
        ("password='a \\'b c' user=x", "password=*** user=x"),
        ("PGPASSWORD=hunter2", "PGPASSWORD=***"),
        ("postgresql://u:hunter2@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:p:w@d@h/db", "postgresql://u:***@h/db"),
        ('{"aws_secret_access_key": "abc"}', '{"aws_secret_access_key": ***}'),
        ("failed\nDETAIL:  Key (email)=(a@b.c) exists.\nHINT: x", "failed\nDETAIL: ***\nHINT: x"),
        ("http://127.0.0.1:9464/status", "http://127.0.0.1:9464/status"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown


def test_a_known_dsn_goes_whole_and_in_parts() -> None:
    redact = Redactor(["postgresql://u:hunt%20er2@h/db", "host=x password='s e\\'same'"]).text
    assert redact("at postgresql://u:hunt%20er2@h/db") == "at ***"
    assert redact("hunt er2 and hunt%20er2 and s e'same") == "*** and *** and ***"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=3), st.text(), st.text())
def test_a_known_secret_is_never_shown(secret: str, before: str, after: str) -> None:
    shown = Redactor([secret]).text(before + secret + after)
    assert secret not in shown or secret in MASK or MASK in secret or secret in before + after


def test_trees_become_json_without_secrets() -> None:
    tree = {"a": ["sesame", 1, None, True, 1.5], "sesame": {"b": Lsn(0x10)}, "c": b"sesame"}
    assert Redactor(["sesame"]).tree(tree) == {
        "a": [MASK, 1, None, True, 1.5],
        MASK: {"b": "0/10"},
        "c": "<6 bytes>",
    }


def test_the_repr_shows_nothing() -> None:
    assert "sesame" not in repr(Redactor(["sesame"]))
