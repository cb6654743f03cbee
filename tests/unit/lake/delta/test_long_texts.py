"""Texts of one table's log are cut before they enter errors, the log and /status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.log import TableLog
from ingestd.lake.opening import refuse_foreign
from ingestd.lake.store.errors import table_fault
from ingestd.lake.store.store import open_store
from ingestd.model.errors import MOST_QUOTED, FolderError
from ingestd.model.schema import TableId
from tests.harness.hostile_folder import Action, commit_of, make_table, metadata

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

LONG = "x" * 3_000_000
MOST = 10_000
FIELD = {"name": LONG, "type": "integer", "nullable": True, "metadata": {}}
KINDS: dict[str, list[Action]] = {
    "a feature": [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [LONG]}}
    ],
    "a partition": [metadata({"type": "struct", "fields": [FIELD]}, partitionColumns=[LONG])],
    "an app": [{"txn": {"appId": "ingestd/" + LONG, "version": 1}}],
}


def open_as_lake(table: TableLog) -> None:
    table.load()
    table.ensure_own()
    refuse_foreign(table)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_short(tmp_path: Path, kind: str) -> None:
    make_table(tmp_path / "shop/public/bad", commit_of(KINDS[kind]))
    table = TableLog(open_store(str(tmp_path), None), "shop/public/bad", "x")
    with pytest.raises(FolderError) as told:
        open_as_lake(table)
    of_table = table_fault(told.value, "shop", TableId("public", "bad"), table.uri)
    for error in (told.value, of_table):
        assert len(error.what) + len(error.remedy or "") < MOST


def test_part_of_a_command_is_no_remedy() -> None:
    error = FolderError("x" * 2 * MOST_QUOTED, remedy="rm -r /" + "x" * MOST_QUOTED)
    assert len(error.what) == MOST_QUOTED + len("...")
    assert "rm" not in (error.remedy or "")
    assert FolderError("x", remedy="rm -r /x").remedy == "rm -r /x"
