from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.delta.types import arrow_type
from ingestd.model.schema import lake_type_name

NAMES = st.text(st.characters(codec="utf-8") | st.sampled_from("`:,<>()"), min_size=1)
TYPES = st.recursive(
    st.sampled_from([pa.int32(), pa.string(), pa.decimal128(10, 2)]),
    lambda inner: st.one_of(
        inner.map(lambda kind: pa.list_(pa.field("element", kind))),
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(
            lambda fields: pa.struct(list(fields.items()))
        ),
    ),
    max_leaves=5,
)


@given(TYPES)
def test_a_type_has_one_name(kind: pa.DataType) -> None:
    assert arrow_type(lake_type_name(kind)) == kind


@pytest.mark.attack("table owner")
def test_the_name_of_an_attribute_is_quoted() -> None:
    """Spark's CREATE TABLE has it."""
    name = "a:int> COMMENT '', b struct<`c"
    assert lake_type_name(pa.struct([(name, pa.int32()), ("d_1", pa.int32())])) == (
        "struct<`a:int> COMMENT '', b struct<``c`:integer,d_1:integer>"
    )
