"""One rule for the names of all kinds of catalogs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.catalogs.names import NameOutcome, NameReport, is_same_location, register_all
from ingestd.model.catalog_table import CatalogListing, CatalogTable, sql_type
from ingestd.model.errors import OperatorError, TransientError

NAMES = st.sampled_from("abcd")
OURS, THEIRS = "s3://lake/{}", "s3://other/{}"


def table(name: str, comment: str = "") -> CatalogTable:
    return CatalogTable(name, OURS.format(name), comment, (), {})


class Held:
    """A CatalogSession that holds locations and comments by name."""

    schema = "main.shop"

    def __init__(self, tables: dict[str, tuple[str, str]]) -> None:
        self.tables = dict(tables)
        self.is_made = False

    def ensure_schema(self) -> None:
        self.is_made = True

    def location_of(self, name: str) -> str | None:
        assert self.is_made
        return self.tables[name][0] if name in self.tables else None

    def create_table(self, new: CatalogTable) -> None:
        assert new.name not in self.tables
        self.tables[new.name] = (new.location, new.comment)

    def update_table(self, new: CatalogTable) -> bool:
        before = self.tables[new.name]
        self.tables[new.name] = (new.location, new.comment)
        return before != self.tables[new.name]

    def drop_table(self, name: str) -> None:
        del self.tables[name]

    def close(self) -> None:
        pass


class Deaf(Held):
    """Does not answer for names in `silent`."""

    def __init__(self, silent: str) -> None:
        super().__init__({})
        self.silent = silent

    def create_table(self, new: CatalogTable) -> None:
        if new.name in self.silent:
            raise TransientError("no answer", reason="catalog")
        super().create_table(new)


def test_a_name_without_an_answer_does_not_concern_the_others() -> None:
    session = Deaf("bce")
    found = [*register_all(session, CatalogListing(tuple(map(table, "abcdefg")), {}, {}))]
    assert {r.name[-1] for r in found if r.outcome is NameOutcome.FAILED} == set("bce")
    assert session.tables.keys() == set("adfg")


def test_a_catalog_that_does_not_answer_is_left_in_peace() -> None:
    session = Deaf("bcdefg")
    with pytest.raises(TransientError):
        list(register_all(session, CatalogListing(tuple(map(table, "abcdefg")), {}, {})))


@given(
    there=st.dictionaries(NAMES, st.booleans()),
    wanted=st.sets(NAMES),
    dropped=st.sets(NAMES),
)
def test_only_names_at_our_locations_change(
    there: dict[str, bool], wanted: set[str], dropped: set[str]
) -> None:
    dropped -= wanted
    held = Held(
        {name: ((OURS if ours else THEIRS).format(name), "old") for name, ours in there.items()}
    )
    listing = CatalogListing(
        tuple(table(name, "new") for name in sorted(wanted)),
        {name: OURS.format(name) for name in dropped},
    )
    foreign = {name: held.tables[name] for name, ours in there.items() if not ours}
    reports = list(register_all(held, listing))
    assert {n: v for n, v in held.tables.items() if n in foreign} == foreign
    assert set(held.tables) == (set(there) | wanted) - {n for n in dropped if there.get(n)}
    failed = {r.name for r in reports if r.outcome is NameOutcome.FAILED}
    assert failed == {f"main.shop.{name}" for name in wanted & foreign.keys()}
    before = dict(held.tables)
    again = list(register_all(held, listing))
    assert held.tables == before
    assert {r.outcome for r in again} <= {NameOutcome.UNCHANGED, NameOutcome.FAILED}


def test_a_foreign_location_is_named_with_ours() -> None:
    held = Held({"a": ("s3://other/a", "")})
    [report] = register_all(held, CatalogListing((table("a"),)))
    assert str(report.fault) == (
        "main.shop.a in the catalog is at s3://other/a, not at s3://lake/a\n"
        "  remedy: drop main.shop.a in the catalog if it is no longer needed, or set another"
        " [catalog] schema_name"
    )


def test_a_fault_of_one_name_does_not_concern_the_others() -> None:
    class Refusing(Held):
        def create_table(self, new: CatalogTable) -> None:
            if new.name == "a":
                raise OperatorError("refused")
            super().create_table(new)

    held = Refusing({})
    fault = OperatorError("its log is damaged")
    reports = list(register_all(held, CatalogListing((table("a"), table("b")), {}, {"c": fault})))
    assert [(r.name[-1], r.outcome) for r in reports] == [
        ("c", NameOutcome.FAILED),
        ("a", NameOutcome.FAILED),
        ("b", NameOutcome.CREATED),
    ]
    assert reports[0] == NameReport("main.shop.c", NameOutcome.FAILED, fault)


def test_a_catalog_that_does_not_answer_ends_it() -> None:
    class Silent(Held):
        def location_of(self, name: str) -> str | None:
            raise TransientError(name, reason="catalog")

    with pytest.raises(TransientError):
        list(register_all(Silent({}), CatalogListing((table("a"),))))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("file:///a/b", "file:/a/b/", True),
        ("/a/b", "file:///a/b", True),
        ("s3a://x/y", "s3://x/y/", True),
        ("s3://x/y", "s3://x/yy", False),
        ("", "file:///a", False),
    ],
)
def test_a_location_is_compared(one: str, other: str, *, expected: bool) -> None:
    assert is_same_location(one, other) is is_same_location(other, one) is expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("long", "bigint"),
        ("decimal(12,2)", "decimal(12,2)"),
        ("timestamp_ntz", "timestamp_ntz"),
        ({"type": "array", "elementType": "integer", "containsNull": True}, "array<int>"),
        ({"type": "map", "keyType": "string", "valueType": "short"}, "map<string,smallint>"),
        (
            {"type": "struct", "fields": [{"name": "a", "type": "byte"}]},
            "struct<a:tinyint>",
        ),
    ],
)
def test_a_type_in_sql(kind: object, expected: str) -> None:
    assert sql_type(kind) == expected
