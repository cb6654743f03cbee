"""A table's columns under the config and the publication."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.config import TableSettings
from ingestd.decode.type_mapping import BUILT_IN, lake_type
from ingestd.model.errors import TableError
from ingestd.model.schema import Column, Mask, Table, TableId, with_before
from ingestd.postgres.captured.columns import as_published, controlled

if TYPE_CHECKING:
    from ingestd.model.schema import ReplicaIdentity

KEY = b"sesame"
INT, TEXT, NUMERIC = 23, 25, 1700
TEXTS, NUMERICS = 1009, 1231


def column(name: str, type_oid: int = TEXT, *, identity: bool = False) -> Column:
    return Column(name, type_oid, -1, lake_type(type_oid, -1), identity=identity, nullable=False)


def orders(
    *,
    identity: ReplicaIdentity = "d",
    by: tuple[str, ...] = ("id",),
    key: tuple[str, ...] = ("id",),
    full: bool = False,
) -> Table:
    columns = (
        column("id", INT, identity=identity == "f" or "id" in by),
        column("email", identity=identity == "f" or "email" in by),
        column("amount", NUMERIC, identity=identity == "f"),
        column("note", identity=identity == "f"),
    )
    table = Table(TableId("public", "orders"), 7, columns, identity, key)
    return with_before(table, full=full)


def settings(**keys: Any) -> TableSettings:
    return TableSettings.model_validate(keys)


def apply(table: Table, *, strict: bool = True, **keys: Any) -> Table:
    return controlled(table, settings(**keys), KEY, BUILT_IN, strict=strict)


def names(table: Table) -> list[str]:
    return [c.name for c in table.columns]


def test_without_controls_a_table_stays_as_it_is() -> None:
    assert apply(orders()) == orders()


def test_an_excluded_column_is_left_out() -> None:
    table = apply(orders(identity="f", full=True), exclude_columns=["note", "email"])
    assert names(table) == ["id", "amount"]
    assert table.before == ("id", "amount")
    assert table.key == ("id",)


def test_a_hashed_column_is_a_string_with_the_key() -> None:
    old = replace(column("amount", NUMERIC), missing="12.50")
    table = replace(orders(), columns=(column("id", INT, identity=True), old))
    found = apply(table, mask_columns={"amount": "sha256", "id": "sha256"}).column("amount")
    assert (found.type, found.mask) == (pa.string(), Mask("sha256", KEY))
    assert found.missing == hmac.new(KEY, b"12.50", hashlib.sha256).hexdigest()
    assert "sesame" not in repr(found)


def test_a_column_masked_with_null_keeps_its_type_but_no_value() -> None:
    old = replace(column("amount", INT), missing="5")
    table = replace(orders(), columns=(column("id", INT, identity=True), old))
    found = apply(table, mask_columns={"amount": "null"}).column("amount")
    assert (found.type, found.mask, found.missing) == (pa.int32(), Mask("null"), None)
    assert found.nullable


def test_a_type_is_overridden() -> None:
    found = apply(orders(), types={"amount": "decimal(38,9)"}).column("amount")
    assert (found.type, found.is_override) == (pa.decimal128(38, 9), True)


def test_a_type_unfit_for_the_column_is_refused_with_the_key() -> None:
    table = replace(orders(), columns=(replace(column("id", INT), pg_type="integer"),))
    with pytest.raises(TableError, match="column 'id' integer can't be 'date': ") as caught:
        apply(table, types={"id": "date"})
    assert caught.value.remedy == 'correct table."public.orders".types.id in the config'


@pytest.mark.parametrize(
    "keys",
    [
        {"exclude_columns": ["emial"]},
        {"mask_columns": {"emial": "sha256"}},
        {"types": {"emial": "string"}},
    ],
)
def test_a_column_that_is_not_there_is_refused_with_the_nearest(keys: dict[str, Any]) -> None:
    [key] = keys
    with pytest.raises(TableError, match=f"column 'emial' in {key} does not exist") as caught:
        apply(orders(), **keys)
    remedy = f"did you mean 'email'? correct table.\"public.orders\".{key}"
    assert caught.value.remedy == remedy
    if key == "types":
        assert apply(orders(), strict=False, **keys) == orders()


@pytest.mark.parametrize("key", ["exclude_columns", "mask_columns"])
def test_a_hidden_column_is_not_let_by_under_another_name(key: str) -> None:
    section = {"note": "sha256"} if key == "mask_columns" else ["note"]

    def told(*told_names: str, is_listed: bool = False) -> Table:
        table = replace(orders(), columns=tuple(map(column, told_names)))
        controls = settings(**{key: section})
        return controlled(table, controls, KEY, BUILT_IN, strict=False, is_listed=is_listed)

    assert "more" in names(told("id", "note", "more"))
    for columns in (("id", "memo"), ("id", "email")):
        with pytest.raises(TableError, match=f"'note' in {key} is missing"):
            told(*columns)
    if key == "exclude_columns":  # the server leaves it out, whatever it is called
        assert names(told("id", "memo", is_listed=True)) == ["id", "memo"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("table", "hidden", "refused"),
    [
        (orders(), "id", True),
        (orders(), "email", False),
        (orders(identity="i", by=("email",)), "email", True),
        (orders(identity="i", by=("email",)), "id", False),
        (orders(identity="f"), "id", True),
        (orders(identity="f"), "email", False),
        (orders(identity="f", key=()), "id", False),
        (orders(identity="n", by=()), "id", False),
    ],
)
def test_what_tells_rows_apart_can_not_be_hidden(
    table: Table,
    hidden: str,
    refused: bool,  # noqa: FBT001
    strict: bool,  # noqa: FBT001
) -> None:
    for keys in ({"exclude_columns": [hidden]}, {"mask_columns": {hidden: "null"}}):
        if refused:
            with pytest.raises(TableError, match=f"column '{hidden}' belongs to the ") as caught:
                apply(table, strict=strict, **keys)
            assert str(caught.value.remedy).endswith(f'table."public.orders".{next(iter(keys))}')
        else:
            found = apply(table, strict=strict, **keys)
            assert set(found.before) <= set(names(found))
            assert set(found.key) <= set(names(found))
    assert apply(table, mask_columns={hidden: "sha256"}).column(hidden).mask is not None


def test_a_key_of_which_a_part_is_left_out_is_none() -> None:
    table = orders(identity="i", by=("email",), key=("id", "note"))
    assert apply(table, exclude_columns=["note"]).key == ()


def test_a_table_of_no_columns_is_refused() -> None:
    with pytest.raises(TableError, match="leaves no column"):
        apply(orders(identity="f", key=()), exclude_columns=["id", "email", "amount", "note"])


def test_what_is_published_of_a_table_is_what_is_captured() -> None:
    table = as_published(orders(identity="f", full=True), frozenset({"note", "id"}), "(id > 5)")
    assert names(table) == ["id", "note"]
    assert table.before == ("id", "note")
    assert table.row_filter == "(id > 5)"
    assert as_published(orders(), None, None) == orders()


def test_texts_that_tell_rows_apart_are_no_decimals() -> None:
    """``1.5`` and ``1.50`` are two keys of the source's, and one decimal."""
    by_email = orders(by=("email",), key=("email",))
    with pytest.raises(TableError, match="would be one") as caught:
        apply(by_email, types={"email": " De cimal(12, 2)"})
    assert "types" in str(caught.value.remedy)
    assert apply(by_email, types={"email": "integer"}).column("email").type == pa.int32()
    assert apply(by_email, types={"note": "decimal(12,2)"}).column("note").is_override
    for name in ("id", "amount"):
        by_number = orders(by=(name,), key=(name,))
        assert apply(by_number, types={name: "decimal(12,2)"}).column(name).is_override
    whole = orders(identity="f", key=())
    assert apply(whole, types={"email": "decimal(12,2)"}).column("email").is_override
    texts, numbers = column("k", TEXTS, identity=True), column("k", NUMERICS, identity=True)
    lists = Table(TableId("public", "lists"), 8, (texts,), "d", ("k",))
    with pytest.raises(TableError, match="would be one"):
        apply(lists, types={"k": "array<decimal(12,2)>"})
    assert apply(replace(lists, columns=(numbers,)), types={"k": "array<decimal(12,2)>"})
