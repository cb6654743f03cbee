"""The text of commits: odd characters in statistics, through every reader of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ingestd.lake.delta.commit import CONTENT, STAMPS, commit_path, is_complete_commit, parse_commit
from ingestd.lake.delta.tail import CommitTail
from ingestd.lake.reference.log import ReferenceLog
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import open_store

_ODD = [
    *(chr(n) for n in (*range(0x20), *range(0x7F, 0xA1))),
    *("\u2028", "\u2029", "\ufeff", "\ufffe", "\U0001f600", '"', "\\", "\\n", "'", "\ud800"),
]


def _commit(text: str, *, is_escaped: bool) -> str:
    def line(action: object) -> str:
        return json.dumps(action, ensure_ascii=is_escaped)

    # The statistics are JSON inside JSON: deltalake writes neither with more escapes than it must.
    inner = json.dumps({"numRecords": 1, "minValues": {"v": text}}, ensure_ascii=is_escaped)
    info = {"commitInfo": {CONTENT: "d1", "ingestdWriter": "w", "ingestdResume": text}}
    place = {"path": "f.parquet", "partitionValues": {}, "size": 1, "modificationTime": 1}
    add = {"add": {**place, "dataChange": True, "stats": inner}}
    return "".join(f"{line(a)}\n" for a in (info, {"txn": {"appId": "a", "version": 1}}, add))


@pytest.mark.parametrize("is_escaped", [False, True])
def test_odd_characters_in_statistics_cut_no_commit(tmp_path: Path, *, is_escaped: bool) -> None:
    store = open_store(str(tmp_path), None)
    for number, character in enumerate(_ODD):
        text = f"a{character}b"
        if character == "\ud800" and not is_escaped:  # UTF-8 has no such character
            continue
        commit = _commit(text, is_escaped=is_escaped)
        if character == "\ud800":  # half of a pair: other readers refuse the commit
            with pytest.raises(OddFileError):
                parse_commit(commit.encode(), "x")
            continue
        found = parse_commit(commit.encode(), "x")
        assert is_complete_commit(commit.encode(), "x")
        assert len(found.files) == len(found.app_ids) == 1
        assert found.writer == "w"
        assert found.resume("a") == text
        found.judge("t")
        folder = tmp_path / str(number)
        (folder / "_delta_log").mkdir(parents=True)
        (folder / "f.parquet").touch()
        (tmp_path / commit_path(str(number), 0)).touch()
        (tmp_path / commit_path(str(number), 1)).write_bytes(commit.encode())
        files = CommitTail(store, str(number), 0).files()
        assert files == [("f.parquet", {"numRecords": 1, "minValues": {"v": text}})]
        log = ReferenceLog(store, str(number), "a", lambda _: None)
        assert log.content_at(1) == "d1"


def test_no_commit_is_split_by_other_separators_of_lines() -> None:
    """`str.splitlines` cuts at U+0085, U+2028 and others, which JSON has unescaped."""
    root = Path(__file__).parents[4]
    found = [
        path.name
        for path in (root / "ingestd/lake").rglob("*.py")
        if re.search(r"\.splitlines\(", path.read_text())
    ]
    assert found == []
    commits = (root / "spark_jobs/delta_log/commits.py").read_text()
    assert ".splitlines(" not in commits


@pytest.mark.attack("lake writer")
def test_only_the_keys_that_are_used_are_kept() -> None:
    info = {f"k{n}": "x" for n in range(1000)} | dict.fromkeys(STAMPS, "y")
    lines = [json.dumps({"commitInfo": info}), json.dumps({"commitInfo": {"ingestdCommit": 5}})]
    found = parse_commit("\n".join(lines).encode(), "x.json")
    assert found.stamps == dict.fromkeys(STAMPS, "y")
