from __future__ import annotations

import pytest

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
