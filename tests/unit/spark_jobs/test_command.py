from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.cli.arguments import spark_uri
from spark_jobs.mirror import parser

GIVEN = ["--source", "shop", "--target", "m"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tables", "nix"], "'nix' is not `schema.table`"),
        (["--interval", "-1"], "must be above 0, not -1"),
        (["--parallel", "0"], "must be above 0, not 0"),
        (["--parallel", "many"], "invalid int value: 'many'"),
    ],
)
def test_senseless_arguments_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*GIVEN, *more])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("../lake", "/a/lake"),
        ("lake/", "/a/b/lake"),
        ("./x/../lake", "/a/b/lake"),
        ("/x//y/../lake/", "/x/lake"),
        ("file:///x/y/../lake", "/x/lake"),
        ("s3://bucket/lake/", "s3a://bucket/lake"),
    ],
)
def test_a_path_is_as_hadoop_names_its_files(
    monkeypatch: pytest.MonkeyPatch, uri: str, path: str
) -> None:
    monkeypatch.setattr(Path, "absolute", lambda given: Path("/a/b", given))
    assert spark_uri(uri) == path
