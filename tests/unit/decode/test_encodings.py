"""Values of databases in other encodings: the same as the server's own conversion, else refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from ingestd.decode.values.cast import cast
from ingestd.decode.values.encodings import Encoding, encoding_of
from ingestd.decode.values.masks import masked
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.model.schema import Mask

if TYPE_CHECKING:
    from collections.abc import Sequence


def texts(values: Sequence[bytes | None], encoding: Encoding | None) -> TextColumn:
    lengths = np.array([len(v or b"") for v in values], np.int64)
    starts = np.cumsum(lengths) - lengths
    present = np.array([v is not None for v in values])
    return TextColumn(
        ByteBuffer(b"".join(v or b"" for v in values), encoding), starts, lengths, present
    )


@pytest.mark.parametrize("name", ["WIN1252", "EUC_JP"])
def test_ascii_nulls_arrays_and_masks_are_as_in_utf8(name: str) -> None:
    encoding, mask = encoding_of(name), Mask("sha256", b"k" * 32)
    plain = [None, b"a", b"", b"z" * 100]
    assert cast(texts(plain, encoding), pa.string())[0] == cast(texts(plain, None), pa.string())[0]
    text = "\u65e5" if name == "EUC_JP" else "\u20ac"
    assert encoding is not None
    own, utf8 = encoding.encode(text), text.encode()
    bad = b"\x81" if name == "WIN1252" else b"\xff\xff"
    array, refused = cast(
        texts([None, b"{%s,b}" % own, b"{%s}" % bad], encoding), pa.list_(pa.string())
    )
    assert array.to_pylist() == [None, [text, "b"], None]
    assert refused.tolist() == [2]
    assert masked(texts([own, None, b"a"], encoding), mask) == masked(
        texts([utf8, None, b"a"], None), mask
    )
    assert len(masked(texts([bad], encoding), mask)[0].as_py()) == 64
