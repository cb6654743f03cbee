"""Masks: what is stored instead of a value. `decode/change_batch.py` applies them.

Source: RFC 2104 (HMAC), FIPS 180-4 (SHA-256).
"""

from __future__ import annotations

import hmac

import pyarrow as pa

from ingestd.decode.values.encodings import Encoding
from ingestd.decode.values.text_column import TextColumn
from ingestd.model.schema import Mask


def masked_text(text: str | None, mask: Mask) -> str | None:
    """Return the masked value for a text: HMAC-SHA256 in hex, or null."""
    if text is None or mask.kind == "null":
        return None
    return _digest(text.encode(), mask)


def masked(texts: TextColumn, mask: Mask) -> pa.StringArray:
    """Mask a column's values; null stays null. Equal values are hashed once."""
    if mask.kind == "null":
        return pa.nulls(len(texts), pa.string())
    if texts.source.encoding is not None:
        return _masked_each(texts, mask, texts.source.encoding)
    values = texts.gather().dictionary_encode()
    hidden = [_digest(value.as_py(), mask) for value in values.dictionary]
    return pa.array(hidden, pa.string()).take(values.indices)


def _masked_each(texts: TextColumn, mask: Mask, encoding: Encoding) -> pa.StringArray:
    """Mask values of another encoding by their UTF-8, or by their bytes if these are invalid."""
    values = texts.gather().dictionary_encode()
    hidden = []
    for value in values.dictionary.to_pylist():
        try:
            hidden.append(_digest(encoding.decode(value).encode(), mask))
        except UnicodeDecodeError:
            hidden.append(_digest(value, mask))
    return pa.array(hidden, pa.string()).take(values.indices)


def _digest(text: bytes, mask: Mask) -> str:
    return hmac.digest(mask.key, text, "sha256").hex()
