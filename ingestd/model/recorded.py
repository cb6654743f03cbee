"""Texts that ingestd recorded in the lake, read without trusting them.

Anyone who can write to the lake, or only to one table's folder, controls these texts: where polling
stands, what is left of a snapshot, the lake's id, the pause mark, a backfill's plan. So size,
number of values and depth are limited before a text is parsed, and each value has no type until it
was taken by one of the methods of `Recorded`. The only error is RecordError; its reader decides
what that means for the table. (Commits of a Delta log: `ingestd.lake.delta.commit`.)

Source: RFC 8259, sections 4 (names should be unique), 6 (numbers), 8.2 (unpaired surrogates).
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b85decode
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from ingestd.model.lsn import Lsn

MOST_BYTES = 64 << 10
MOST_VALUES = 1_000
MOST_DEPTH = 8
LONG = (1 << 63) - 1
"""The highest position and transaction id, which the lake's columns hold as 64 bits, signed."""
_SECONDS = float(1 << 40)
_DIGITS = re.compile(r"-?[0-9]{1,19}\Z")


class RecordError(ValueError):
    """A recorded text is not one that ingestd writes. The text says why, without its values."""


class TruncatedRecordError(RecordError):
    """A recorded text is not JSON, as after a power failure."""


def read_json(
    content: str | bytes,
    most_bytes: int = MOST_BYTES,
    most_values: int = MOST_VALUES,
    most_depth: int = MOST_DEPTH,
) -> Recorded:
    """Return the value of a JSON text within these limits. Raise RecordError.

    The limits bound the memory: a value of a few bytes of text takes up to a hundred.
    """
    if len(content) > most_bytes:
        raise RecordError(f"it has more than {most_bytes} bytes")
    try:
        text = content if isinstance(content, str) else content.decode()
        _ensure_small(text, most_values, most_depth)
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        if "\\u" in text or not text.isascii():
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair
    except RecordError:
        raise
    except UnicodeEncodeError:
        raise RecordError("it has half a surrogate pair") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        what = "it is not JSON" if content.strip() else "it is empty"
        raise TruncatedRecordError(what) from None
    except (ValueError, RecursionError):  # a number of thousands of digits
        raise RecordError("it has a number that is too long") from None
    return Recorded(found)


def _ensure_small(text: str, most_values: int, most_depth: int) -> None:
    """Raise RecordError for too many values or too deep nesting, counted outside of strings."""
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    if unescaped.count('"') > 4 * most_values:  # an object's value has a name
        raise RecordError(f"it has more than {most_values} values")
    if sum(map(_outside_strings(text).count, ",[{")) > most_values:
        raise RecordError(f"it has more than {most_values} values")
    ensure_depth(text, most_depth)


def ensure_depth(text: str, most_depth: int) -> None:
    """Raise RecordError for a JSON text that is nested too deep. It does not need to be valid."""
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", _outside_strings(text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > most_depth:
            raise RecordError(f"it is nested more than {most_depth} deep")


def _outside_strings(text: str) -> str:
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    return "".join(unescaped.split('"')[::2])


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RecordError("it has a name twice")
    return found


def _refuse_constant(_: str) -> None:
    raise RecordError("it has a number that is not finite")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A value of a recorded text. Each method raises RecordError for a value of another type.

    `name`: its place in the text, for the error.
    """

    value: object
    name: str = ""

    @property
    def is_null(self) -> bool:
        """Return whether it is null."""
        return self.value is None

    def field(self, name: str) -> Recorded:
        """Return a field of an object; null if it has none of this name."""
        return Recorded(self._object().get(name), name)

    def fields(self) -> dict[str, Recorded]:
        """Return the fields of an object by name."""
        return {name: Recorded(value, self.name) for name, value in self._object().items()}

    def items(self, count: int | None = None) -> list[Recorded]:
        """Return the items of an array. `count`: how many it must have."""
        if not isinstance(self.value, list):
            raise self._is_not("an array")
        if count is not None and len(self.value) != count:
            raise self._is_not(f"an array of {count}")
        return [Recorded(value, self.name) for value in self.value]

    def text(self) -> str:
        """Return a string without NUL, which no text of the source contains."""
        if not isinstance(self.value, str) or "\0" in self.value:
            raise self._is_not("a text")
        return self.value

    def optional_text(self) -> str | None:
        """Return a string as `text` does, or None for null."""
        return None if self.is_null else self.text()

    def integer(self, low: int = 0, high: int = LONG) -> int:
        """Return an integer within these bounds."""
        is_integer = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not is_integer or not low <= self.value <= high:  # type: ignore[operator]
            raise self._is_not(f"an integer from {low} to {high}")
        return self.value  # type: ignore[return-value]

    def flag(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            raise self._is_not("true or false")
        return self.value

    def seconds(self) -> float:
        """Return a finite number of seconds, as of a Unix time."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not abs(self.value) <= _SECONDS:  # type: ignore[arg-type]
            raise self._is_not("a time")
        return float(self.value)  # type: ignore[arg-type]

    def position(self) -> Lsn:
        """Return an LSN in Postgres' text form."""
        try:
            found = Lsn.parse(self.text())
        except ValueError:
            raise self._is_not("a position") from None
        return Lsn(Recorded(int(found), self.name).integer())

    def instant(self) -> datetime:
        """Return a time with an offset, in ISO 8601, in UTC."""
        with suppress(ValueError, OverflowError):
            found = datetime.fromisoformat(self.text())
            if found.tzinfo is not None:
                return found.astimezone(UTC)
        raise self._is_not("a time with an offset")

    def packed(self, most_bytes: int) -> bytes:
        """Return the content of a text in base 85, decompressed, of at most `most_bytes`."""
        opened = zlib.decompressobj()
        try:
            content = opened.decompress(b85decode(self.text()), most_bytes)
        except (ValueError, zlib.error):
            raise self._is_not("compressed") from None
        if opened.unconsumed_tail or not opened.eof or opened.unused_data:
            raise self._is_not(f"compressed, of at most {most_bytes} bytes")
        return content

    def _object(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self._is_not("a JSON object")
        return self.value

    def _is_not(self, kind: str) -> RecordError:
        name = f'"{self.name}"' if self.name else "it"
        return RecordError(f"{name} is not {kind}")


def integer_of(text: str, low: int = 0, high: int = LONG) -> int:
    """Return the integer in a part of a recorded text. Raise RecordError."""
    if not _DIGITS.match(text):
        raise RecordError("it has a number that is not an integer")
    return Recorded(int(text), "number").integer(low, high)
