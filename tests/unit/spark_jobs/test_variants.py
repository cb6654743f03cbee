"""Which columns are stored as VARIANT, and which values it can't hold."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from ingestd.lake.definitions import Definition, LakeColumn
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.lake_state import TableState
from spark_jobs.lake.variants import ensure_same_types, is_exact, variant_names, with_variants
from spark_jobs.pairs import PAIRS, Pair, ensure_variant
from tests.harness.documents import DOCUMENTS, is_held, jsonb_text

JSONB, TEXT = 3802, 25


def column(name: str, oid: int, *, identity: bool = False) -> LakeColumn:
    return LakeColumn(name, name, "string", "", identity, key=identity, type_oid=oid)


def definition(*columns: LakeColumn, lives: tuple[LakeColumn, ...] = ()) -> Definition:
    return Definition(
        "public.t",
        1,
        1,
        TableState.LIVE,
        None,
        is_complete=True,
        snapshot_lsn=1,
        columns=columns,
        replica_identity="d",
        lives=(*lives, *columns),
    )


def test_jsonb_is_variant_unless_it_must_be_compared() -> None:
    """Nor is json, an array, or a column that has values of an earlier one with its name."""
    every = definition(
        column("id", JSONB, identity=True),
        column("doc", JSONB),
        column("text", TEXT),
        column("json", 114),
        replace(column("docs", 3807), delta_type="array<string>"),
        column("again", JSONB),
        lives=(replace(column("again", TEXT), until_lsn=5),),
    )
    marked = with_variants(every)
    assert variant_names(marked.columns) == variant_names(marked.lives) == ["doc"]
    assert variant_names(every.columns) == []
    of_values = definition(column("again", JSONB), lives=(column("again", JSONB),))
    assert variant_names(with_variants(of_values).lives) == ["again"]


@given(DOCUMENTS)
def test_a_default_is_exact_if_its_numbers_are(document: object) -> None:
    assert is_exact(jsonb_text(document)) == is_held(document)


@pytest.mark.parametrize(
    "text", ["[" * 100 + "]" * 100, str(list(range(2000))), f'"{"x" * 100_000}"']
)
def test_a_deep_or_long_default_is_exact(text: str) -> None:
    """As the same text is where the server sends it."""
    assert is_exact(text)


@pytest.mark.parametrize("text", ["{", "x", "[" * 100_000, "1e5", hashlib.sha256().hexdigest()])
def test_what_no_jsonb_has_is_not_exact(text: str) -> None:
    assert not is_exact(text)


@pytest.mark.parametrize(
    ("kind", "variants", "choice", "said"),
    [
        ("variant", ["Doc"], "with", None),
        ("string", [], "without", None),
        ("string", [], "with", None),
        (
            "string",
            ["Doc"],
            "with",
            r"Doc was made without --variant\n.*or move it by a separate job without --variant",
        ),
        (
            "variant",
            [],
            "without",
            r"Doc was made with --variant\n.*or move it by a separate job with --variant",
        ),
        ("variant", [], "with", "must be text: it belongs to the key"),
    ],
)
def test_a_table_of_the_other_type_is_a_fault(
    kind: str, variants: list[str], choice: str, said: str | None
) -> None:
    is_wanted = choice == "with"

    def ensure() -> None:
        types, names = {"doc": kind}, ["Doc", "new"]
        ensure_same_types("public.t", types, names, [*variants, "new"], is_wanted=is_wanted)

    if said is None:
        ensure()
        return
    with pytest.raises(TableError, match=said) as refused:
        ensure()
    assert str(refused.value.remedy).startswith("--rebuild public.t re-creates it")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_only_spark_4_has_variant(pair: Pair) -> None:
    if pair.spark.startswith("4."):
        ensure_variant(pair.releases[0])
        return
    with pytest.raises(OperatorError, match=r"--variant needs Spark 4") as refused:
        ensure_variant(pair.releases[0])
    assert "pip install 'pyspark" in str(refused.value.remedy)


@pytest.mark.parametrize("job", ["mirror", "history"])
def test_an_older_spark_ends_the_job_before_a_jvm_starts(tmp_path: Path, job: str) -> None:
    older = tmp_path / "pyspark"
    older.mkdir()
    (older / "__init__.py").touch()
    (older / "version.py").write_text('__version__: str = "3.5.7"\n')
    done = subprocess.run(
        [
            *[sys.executable, "-m", f"spark_jobs.{job}", "--lake", "l", "--source", "s"],
            *["--target", "t", "--once", "--variant"],
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("--variant needs Spark 4 or later, with its Delta; this one is")
    assert "remedy: pip install 'pyspark>=4" in done.stderr
