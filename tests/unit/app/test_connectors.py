"""The kinds of capture, and what a start imports of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ingestd.app.connectors import FACTORIES
from ingestd.postgres.settings import SETTINGS

UNASKED = (
    "ingestd.postgres.polling.connector",
    "ingestd.pipeline.verify.run",
    "ingestd.app.table_report",
    "ingestd.lake.verify.lake",
    "ingestd.lake.check",
)
"""What a daemon with sources of kind `wal` does not need."""


def test_every_kind_has_a_factory_with_its_name_and_settings() -> None:
    assert set(FACTORIES) == set(SETTINGS)
    assert len(FACTORIES) == len(SETTINGS)
    for kind, factory in FACTORIES.items():
        assert factory.name == kind
        assert factory.config_model is SETTINGS[kind]


def test_there_is_none_for_another_kind() -> None:
    with pytest.raises(KeyError):
        FACTORIES["file"]


@pytest.mark.slow
def test_a_daemon_imports_what_it_needs_only() -> None:
    asked = "import sys, ingestd.app.daemon, ingestd.app.connectors as r; r.FACTORIES['wal']"
    asked += "; from ingestd.app.lakes import LAKES; from ingestd.config import LakeSettings"
    asked += "; LAKES['delta'](LakeSettings(uri='/lake'), 1)"
    program = f"{asked}; print([m for m in {UNASKED!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
