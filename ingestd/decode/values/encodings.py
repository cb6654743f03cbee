"""Database encodings, converted to UTF-8 as by the server.

Python's codecs convert each character as Postgres does, except for the tables below. Source:
src/backend/utils/mb/Unicode of PostgreSQL; documentation, "Character Set Support".
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode.values.kernels import Flags, any_at
from ingestd.decode.values.text_column import ByteBuffer, TextColumn, texts_of

_ASCII_END = 0x80
_STEP = 1 << 18
"""Bytes that are converted at once; each takes ten times as much memory meanwhile."""
_SINGLE = {
    "ISO_8859_5": "iso8859-5",
    "ISO_8859_6": "iso8859-6",
    "ISO_8859_7": "iso8859-7",
    "ISO_8859_8": "iso8859-8",
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    "LATIN1": "iso8859-1",
    "LATIN2": "iso8859-2",
    "LATIN3": "iso8859-3",
    "LATIN4": "iso8859-4",
    "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10",
    "LATIN7": "iso8859-13",
    "LATIN8": "iso8859-14",
    "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16",
    "WIN866": "cp866",
    "WIN874": "cp874",
    **{f"WIN{n}": f"cp{n}" for n in range(1250, 1259)},
}
_MULTIPLE = {
    "EUC_CN": "gb2312",
    "EUC_JIS_2004": "euc_jis_2004",
    "EUC_JP": "euc_jp",
    "EUC_KR": "euc_kr",
}
_MORE = {
    "EUC_JP": {
        "ada1": (
            "\u2460\u2461\u2462\u2463\u2464\u2465\u2466\u2467\u2468\u2469\u246a\u246b\u246c"
            "\u246d\u246e\u246f\u2470\u2471\u2472\u2473\u2160\u2161\u2162\u2163\u2164\u2165"
            "\u2166\u2167\u2168\u2169"
        ),
        "adc0": (
            "\u3349\u3314\u3322\u334d\u3318\u3327\u3303\u3336\u3351\u3357\u330d\u3326\u3323"
            "\u332b\u334a\u333b\u339c\u339d\u339e\u338e\u338f\u33c4\u33a1"
        ),
        "addf": (
            "\u337b\u301d\u301f\u2116\u33cd\u2121\u32a4\u32a5\u32a6\u32a7\u32a8\u3231\u3232"
            "\u3239\u337e\u337d\u337c\u2252\u2261\u222b\u222e\u2211\u221a\u22a5\u2220\u221f"
            "\u22bf\u2235\u2229\u222a"
        ),
        "8ff3f3": "\u2170\u2171\u2172\u2173\u2174\u2175\u2176\u2177\u2178\u2179\u2160\u2161",
        "8ff4a1": (
            "\u2162\u2163\u2164\u2165\u2166\u2167\u2168\u2169\uff07\uff02\u3231\u2116\u2121"
            "\u70bb\u4efc\u50f4\u51ec\u5307\u5324\ufa0e\u548a\u5759\ufa0f\ufa10\u589e\u5bec"
            "\u5cf5\u5d53\ufa11\u5fb7\u6085\u6120\u654e\u663b\u6665\ufa12\uf929\u6801\ufa13"
            "\ufa14\u6a6b\u6ae2\u6df8\u6df2\u7028\ufa15\ufa16\u7501\u7682\u769e\ufa17\u7930"
            "\ufa18\ufa19\ufa1a\ufa1b\u7ae7\ufa1c\ufa1d\u7da0\u7dd6\ufa1e\u8362\ufa1f\u85b0"
            "\ufa20\ufa21\u8807\ufa22\u8b7f\u8cf4\u8d76\ufa23\ufa24\ufa25\u90de\ufa26\u9115"
            "\ufa27\ufa28\u9592\uf9dc\ufa29\u973b\u974d\u9751\ufa2a\ufa2b\ufa2c\u999e\u9ad9"
            "\u9b72\ufa2d\u9ed1"
        ),
    },
    "EUC_KR": {"a2e8": "\u327e", "a4d4": "\u3164"},
}
"""Characters missing in the codec, as consecutive codes from the first one (hex)."""
_OTHERS = {
    "EUC_JIS_2004": {
        "a1b1": "\u203e",
        "a1bd": "\u2014",
        "a1ef": "\u00a5",
        "a2d6": "\uff5f",
        "a2d7": "\uff60",
    },
    "EUC_JP": {
        "a1c1": "\uff5e",
        "a1c2": "\u2225",
        "a1dd": "\uff0d",
        "a1f1": "\uffe0",
        "a1f2": "\uffe1",
        "a2cc": "\uffe2",
        "8fa2c3": "\uffe4",
    },
}
"""Characters that the codec converts differently."""
_NONE = {
    "EUC_JIS_2004": re.compile(rb"\x8f[\xa2\xa6\xa7\xa9-\xab\xb0-\xed]"),
    "EUC_JP": re.compile(rb"\x8f\xa2\xb7"),
}
"""Codes that the codec converts and the server does not. No other code contains their lead byte."""


@dataclass(frozen=True)
class Encoding:
    """A database's encoding, with its Postgres `name`. Created by `encoding_of`."""

    name: str
    codec: str
    more: Mapping[bytes, str] = field(repr=False)
    others: Mapping[int, str] = field(repr=False)

    @property
    def is_single(self) -> bool:
        """Return whether it is a single-byte encoding."""
        return self.name in _SINGLE

    def decode(self, value: bytes) -> str:
        """Return the text of a value. Raises UnicodeDecodeError if the server can't convert it."""
        none = _NONE.get(self.name)
        if none is not None and (found := none.search(value)) is not None:
            raise UnicodeDecodeError(self.codec, value, *found.span(), "no character")
        text = value.decode(self.codec, f"ingestd_{self.name}" if self.more else "strict")
        return text.translate(self.others) if self.others else text

    def encode(self, text: str) -> bytes:
        """Return the bytes of a text. Raises UnicodeEncodeError."""
        if text.isascii():
            return text.encode("ascii")
        # In runs, because some codes are of two characters, the second of which has no separate
        # code.
        runs = groupby(text, self._codes.__contains__)
        return b"".join(
            b"".join(map(self._codes.__getitem__, run))
            if has_code
            else "".join(run).encode(self.codec)
            for has_code, run in runs
        )

    @cached_property
    def _codes(self) -> dict[str, bytes]:
        codes = {text: code for code, text in self.more.items()}
        return codes | {v: chr(k).encode(self.codec) for k, v in self.others.items()}

    @cached_property
    def utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """For single-byte encodings, by byte: its UTF-8, and the length of that, 0 if invalid."""
        table, lengths = np.zeros((256, 3), np.uint8), np.zeros(256, np.uint8)
        for byte in range(256):
            try:
                found = bytes([byte]).decode(self.codec).encode()
            except UnicodeDecodeError:
                continue
            table[byte, : len(found)] = list(found)
            lengths[byte] = len(found)
        return table, lengths

    def replace(self, error: UnicodeError) -> tuple[str, int]:
        """Return a character missing in the codec; an error handler for the module codecs."""
        assert isinstance(error, UnicodeDecodeError)
        for size in (2, 3):
            found = self.more.get(error.object[error.start : error.start + size])
            if found is not None:
                return found, error.start + size
        raise error


def _made(name: str, codec: str) -> Encoding:
    more = {
        (int(first, 16) + n).to_bytes(len(first) // 2): text
        for first, texts in _MORE.get(name, {}).items()
        for n, text in enumerate(texts)
    }
    others = {
        ord(bytes.fromhex(code).decode(codec)): text for code, text in _OTHERS.get(name, {}).items()
    }
    made = Encoding(name, codec, more, others)
    if more:
        codecs.register_error(f"ingestd_{name}", made.replace)
    return made


_ENCODINGS = {name: _made(name, codec) for name, codec in (_SINGLE | _MULTIPLE).items()}

KNOWN = tuple(_ENCODINGS)
"""The encodings that `encoding_of` knows, by their Postgres names."""


def encoding_of(server_encoding: str) -> Encoding | None:
    """Return the encoding in which values of such a database are read, to convert them here.

    None if the server sends them as UTF-8, or (SQL_ASCII) as raw bytes.
    """
    return _ENCODINGS.get(server_encoding)


class OddName(str):
    r"""A name with invalid bytes, which are written as `\xff`. No query can refer to it.

    `raw`: the bytes in the catalog.
    """

    __slots__ = ("raw",)
    raw: bytes

    @classmethod
    def from_bytes(cls, name: str, raw: bytes) -> OddName:
        """Return an `OddName` with this text and these bytes."""
        made = cls(name)
        made.raw = raw
        return made


def name_of(name: bytes, encoding: Encoding | None) -> str:
    """Return a name from the catalog, an `OddName` if it has invalid bytes.

    `encoding`: the name's encoding; None for UTF-8, and if the database has no encoding.
    """
    try:
        return name.decode() if encoding is None else encoding.decode(name)
    except UnicodeDecodeError:
        return OddName.from_bytes(name.decode("ascii", "backslashreplace"), name)


def distinct_names(names: Sequence[str]) -> list[str]:
    r"""Return the names; an odd one that is written like another gets a number.

    A name may contain a backslash, so a column can be called `\xff` next to one that is that byte.
    """
    taken = {name for name in names if not isinstance(name, OddName)}
    found = []
    for name in names:
        unique = name
        if isinstance(name, OddName):
            numbers = count(2)
            while unique in taken:
                unique = OddName.from_bytes(f"{name} ({next(numbers)})", name.raw)
            taken.add(unique)
        found.append(unique)
    return found


def recoded(texts: TextColumn) -> tuple[TextColumn, Flags]:
    """Return the texts as UTF-8, and a mask of those that can't be converted (absent there)."""
    encoding = texts.source.encoding
    assert encoding is not None
    none = np.zeros(len(texts), np.bool_)
    values = texts.gather()
    data = _bytes_of(values)
    if not (data >= _ASCII_END).any():
        return TextColumn(texts.source.plain, *_places(texts)), none
    if encoding.is_single:
        return _by_table(values, data, texts, encoding)
    return _by_value(values, data, encoding)


def _places(
    texts: TextColumn,
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.int64] | None
]:
    return texts.starts, texts.lengths, texts.present, texts.heads


def _bytes_of(values: pa.BinaryArray) -> NDArray[np.uint8]:
    data = values.buffers()[2] if len(values) else None
    return np.frombuffer(data or b"", np.uint8)[: _bounds(values)[-1]]


def _bounds(values: pa.BinaryArray) -> NDArray[np.int64]:
    if not len(values):
        return np.zeros(1, np.int64)
    return np.frombuffer(values.buffers()[1], np.int32, len(values) + 1).astype(np.int64)


def _by_table(
    values: pa.BinaryArray, data: NDArray[np.uint8], texts: TextColumn, encoding: Encoding
) -> tuple[TextColumn, Flags]:
    table, lengths = encoding.utf8
    bounds = _bounds(values)
    widths = lengths[data]
    bad = any_at(np.flatnonzero(widths == 0), bounds)
    parts = []
    for at in range(0, len(data), _STEP):
        some = slice(at, at + _STEP)
        parts.append(table[data[some]][np.arange(3) < widths[some, None]].tobytes())
    moved = np.concatenate(([0], np.cumsum(widths, dtype=np.int64)))[bounds]
    found = TextColumn(ByteBuffer(b"".join(parts)), moved[:-1], np.diff(moved), texts.present)
    return found.without(bad), bad


def _by_value(
    values: pa.BinaryArray, data: NDArray[np.uint8], encoding: Encoding
) -> tuple[TextColumn, Flags]:
    odd = any_at(np.flatnonzero(data >= _ASCII_END), _bounds(values))
    at = np.flatnonzero(odd)
    converted: list[bytes | None] = []
    for value in values.take(pa.array(at)).to_pylist():
        try:
            converted.append(encoding.decode(value).encode())
        except UnicodeDecodeError:
            converted.append(None)
    new = pa.array(converted, pa.binary())
    bad = np.zeros(len(values), np.bool_)
    bad[at] = new.is_null().to_numpy(zero_copy_only=False)
    return texts_of(pc.replace_with_mask(values, pa.array(odd), new)), bad
