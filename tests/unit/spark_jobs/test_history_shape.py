from __future__ import annotations

import pytest
from pyspark.sql import types as t

from ingestd.lake.definitions import Definition, LakeColumn
from ingestd.model.lake_state import TableState
from spark_jobs import history, mirror
from spark_jobs.histories.shape import ADDED, HistoryShape, is_clashing
from spark_jobs.histories.table import prefix_of


def definition(*columns: LakeColumn, identity: str = "d") -> Definition:
    return Definition("public.t", 1, 1, TableState.LIVE, None, True, 1, columns, identity)  # noqa: FBT003


def lake_column(name: str, source: str, *, is_key: bool = False) -> LakeColumn:
    return LakeColumn(name, source, "string", "text", identity=is_key, key=is_key)


def raw(*names: str) -> t.StructType:
    return t.StructType([t.StructField(n, t.StringType()) for n in (*names, "_cdc_op")])


def test_a_key_is_followed_through_the_lake_columns_it_has_had() -> None:
    """But a source column that is only called so is another one."""
    table = definition(
        lake_column("id__v3", "id", is_key=True), lake_column("note__v2", "note__v2")
    )
    shape = HistoryShape.from_schema(raw("id", "id__v2", "id__v3", "note__v2", "idle"), table)
    assert shape.versions == (("id__v3", "id__v2", "id"),)
    assert shape.columns == ["id", "id__v2", "id__v3", "note__v2", "idle"]


def test_without_a_key_rows_are_identified_by_source_columns() -> None:
    table = definition(lake_column("a", "a"), lake_column("b", "b"), identity="f")
    shape = HistoryShape.from_schema(raw("a", "gone"), table)
    assert (shape.is_keyed, shape.versions) == (False, (("a",),))


@pytest.mark.parametrize("name", [*ADDED, "Valid_From"])
def test_names_that_a_source_has_itself_are_seen(name: str) -> None:
    assert is_clashing(["id", name])
    assert not is_clashing(["id", "valid"])


def test_a_history_tells_what_its_own_columns_are_called() -> None:
    assert prefix_of(["valid_from", "_cdc_valid_from"]) == "_cdc_"
    assert prefix_of(["valid_from"]) == ""


def test_the_command_line_is_the_mirrors() -> None:
    arguments = ["--lake", "l", "--source", "shop", "--target", "t", "--once", "--tables", "a.*"]
    ours, theirs = (
        vars(history.parser().parse_args(arguments)),
        vars(mirror.parser().parse_args(arguments)),
    )
    assert ours.items() <= theirs.items()
