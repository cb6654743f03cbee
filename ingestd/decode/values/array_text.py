"""Parsing of array and composite texts into their elements, all values of a column at once.

Only text that the server itself would write is accepted: formatting its elements by the rules of
the type's output function must give the same text. Any other value is refused completely: several
dimensions, custom bounds, needless quotes or spaces, ``null`` in lower case. Source of the rules:
PostgreSQL, src/backend/utils/adt/arrayfuncs.c, array_out, and rowtypes.c, record_out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.values.text_column import ByteBuffer, TextColumn

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]

_QUOTE, _BACKSLASH, _COMMA = (ord(c) for c in '"\\,')
_SPACES = b" \t\n\r\v\f"
_NULL = int.from_bytes(b"NULL", "big")
_NULL_LENGTH = 4
_TO_LOWER = 0x20202020


def _table(letters: bytes) -> Flags:
    found = np.zeros(256, np.bool_)
    found[np.frombuffer(letters, np.uint8)] = True
    return found


@dataclass(frozen=True, slots=True)
class Dialect:
    """The syntax of a kind of text.

    `special`: the bytes that require quotes. In an array, null is ``NULL``, ``{}`` has no element,
    and quotes are escaped by a backslash. In a record, null is empty, ``()`` has one element, and
    quotes are doubled.
    """

    opening: int
    closing: int
    special: Flags
    is_array: bool


ARRAY = Dialect(ord("{"), ord("}"), _table(b'"\\,{}' + _SPACES), is_array=True)
RECORD = Dialect(ord("("), ord(")"), _table(b'"\\,()' + _SPACES), is_array=False)


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of all values in sequence. `counts`: the number per value, 0 if refused."""

    texts: TextColumn
    counts: Ints
    refused: Flags


def elements_of(texts: TextColumn, dialect: Dialect) -> Elements:
    """Split the values into elements. Absent values have no elements and are not refused."""
    refused = _odd_outline(texts, dialect)
    kept = texts.without(refused)
    values = kept.gather()
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(values) + 1).astype(np.int64)
    content = b"" if data is None else data.to_pybytes()[: int(bounds[-1])]
    found = _find_marks(np.frombuffer(content, np.uint8), bounds, dialect)
    _refuse_misplaced(found, bounds, dialect, refused)
    return _split(found, content, bounds, dialect, refused)


def _odd_outline(texts: TextColumn, dialect: Dialect) -> Flags:
    """Flag values that do not begin and end with the brackets."""
    odd: Flags = texts.lengths < 2  # noqa: PLR2004 - the brackets
    ends = texts.starts + np.maximum(texts.lengths, 1)
    odd |= texts.first() != dialect.opening
    odd |= texts.source.bytes_at(ends - 1) != dialect.closing
    if texts.present is not None:
        odd &= texts.present
    return odd


# --- special bytes ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Marks:
    """The special bytes `letters` at `at`; `row` of each.

    `quotes`: those that begin or end quoting. `inside`: those inside quotes. `dropped`: those that
    only escape the next byte. `badly_escaped`: an escape that the server does not write.
    """

    at: Ints
    letters: NDArray[np.uint8]
    row: NDArray[np.int32]
    quotes: Flags
    inside: Flags
    dropped: Flags
    badly_escaped: Flags
    has_quotes: bool


def _find_marks(data: NDArray[np.uint8], bounds: Ints, dialect: Dialect) -> _Marks:
    at = np.flatnonzero(dialect.special[data])
    letters = data[at]
    first = np.searchsorted(at, bounds)
    row = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(first))
    none = np.zeros(len(at), np.bool_)
    quotes = letters == _QUOTE
    if not quotes.any():  # then nothing is quoted, and a backslash is misplaced
        return _Marks(at, letters, row, none, none, none, none, has_quotes=False)
    next_to = np.zeros(len(at), np.bool_)  # the next special byte follows directly, in the same row
    next_to[:-1] = (np.diff(at) == 1) & (row[1:] == row[:-1])
    dropped, badly_escaped = none, none
    if (letters == _BACKSLASH).any():
        dropped, badly_escaped = _escapes(letters, next_to, dialect)
        if dialect.is_array:
            quotes = quotes & ~_shifted(dropped & next_to)
    is_odd = np.logical_xor.accumulate(quotes) ^ quotes  # the parity of the quotes before
    is_odd ^= np.append(is_odd, [False])[first[:-1]][row]
    inside = is_odd & ~quotes
    if not dialect.is_array:
        closing = quotes & is_odd
        dropped = dropped | (closing & next_to & _shifted_back(quotes & ~is_odd))
    return _Marks(at, letters, row, quotes, inside, dropped, badly_escaped, has_quotes=True)


def _escapes(letters: NDArray[np.uint8], next_to: Flags, dialect: Dialect) -> tuple[Flags, Flags]:
    """Return masks of the escaping backslashes, and of those that are misplaced."""
    is_backslash = letters == _BACKSLASH
    follows = is_backslash & _shifted(is_backslash & next_to)
    places = np.arange(len(letters))
    run = np.maximum.accumulate(np.where(follows, 0, places))
    escaping = is_backslash & ((places - run) % 2 == 0)
    following = np.append(letters[1:], 0)
    good = next_to & (following == _BACKSLASH)
    if dialect.is_array:
        good |= next_to & (following == _QUOTE)
    return escaping, escaping & ~good


def _shifted(flags: Flags) -> Flags:
    """Return the flags moved to the next item."""
    return np.concatenate(([False], flags[:-1]))


def _shifted_back(flags: Flags) -> Flags:
    """Return the flags moved to the previous item."""
    return np.concatenate((flags[1:], [False]))


def _refuse_misplaced(marks: _Marks, bounds: Ints, dialect: Dialect, refused: Flags) -> None:
    """Refuse other special bytes outside quotes, open quotes, and escapes that escape nothing."""
    outside = np.flatnonzero((marks.letters != _COMMA) & ~marks.quotes & ~marks.inside)
    at, letters, row = marks.at[outside], marks.letters[outside], marks.row[outside]
    opens = (letters == dialect.opening) & (at == bounds[:-1][row])
    closes = (letters == dialect.closing) & (at == bounds[1:][row] - 1)
    refused[row[~(opens | closes)]] = True
    if marks.has_quotes:
        refused[marks.row[marks.badly_escaped]] = True
        counts = np.bincount(marks.row[marks.quotes], minlength=len(refused))
        refused |= (counts & 1).astype(np.bool_)


# --- elements --------------------------------------------------------------------------------


def _split(
    marks: _Marks, content: bytes, bounds: Ints, dialect: Dialect, refused: Flags
) -> Elements:
    """Split at the commas and remove the quotes; refuse what the server would write differently."""
    source = ByteBuffer(content)
    comma = (marks.letters == _COMMA) & ~marks.inside & ~refused[marks.row]
    sizes = np.diff(bounds)
    filled = ~refused & (sizes > (2 if dialect.is_array else 0))
    counts = np.bincount(marks.row[comma], minlength=len(sizes)) + filled
    starts, ends = _cut(marks.at[comma], bounds, counts)
    row = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    quoted = np.zeros(len(starts), np.bool_)
    odd = quoted
    if marks.has_quotes:
        quoted = source.bytes_at(starts) == _QUOTE
        odd = quoted & (source.bytes_at(ends - 1) != _QUOTE)
        needed = _need_quotes(marks, ends, refused)
        refused |= _quotes_left_over(marks, row[quoted], len(sizes))
        starts, ends = starts + quoted, ends - quoted
    empty = ends == starts
    if dialect.is_array:
        is_null, looks_null = _nulls(source, starts, ends)
        odd = odd | ~quoted & (empty | looks_null & ~is_null)
        present = quoted | ~is_null
    else:
        looks_null = empty
        present = quoted | ~empty
    if marks.has_quotes:
        odd = odd | quoted & ~(needed | empty | looks_null)
    refused[row[odd]] = True
    if refused.any():
        kept = ~refused[row]
        starts, ends, present = starts[kept], ends[kept], present[kept]
        counts = np.where(refused, 0, counts)
    if marks.dropped.any():
        source, starts, ends = _without(marks.at[marks.dropped], content, starts, ends)
    lengths = np.where(present, ends - starts, 0)
    texts = TextColumn(source, starts, lengths, None if present.all() else present)
    return Elements(texts, counts, refused)


def _cut(commas: Ints, bounds: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return where each element starts and ends: at its value's brackets, or at a comma."""
    filled = counts > 0
    after = np.cumsum(counts)[filled]
    starts = np.empty(int(counts.sum()), np.int64)
    ends = np.empty_like(starts)
    is_first = np.zeros(len(starts), np.bool_)
    is_first[after - counts[filled]] = True
    starts[is_first], starts[~is_first] = bounds[:-1][filled] + 1, commas + 1
    is_last = np.zeros(len(starts), np.bool_)
    is_last[after - 1] = True
    ends[is_last], ends[~is_last] = bounds[1:][filled] - 1, commas
    return starts, ends


def _quotes_left_over(marks: _Marks, quoted_row: NDArray[np.int32], rows: int) -> Flags:
    """Flag values with quotes other than a pair around an element or doubled ones inside."""
    doubled = marks.row[marks.dropped & marks.quotes]
    used = np.bincount(quoted_row, minlength=rows) + np.bincount(doubled, minlength=rows)
    left_over: Flags = np.bincount(marks.row[marks.quotes], minlength=rows) != 2 * used
    return left_over


def _need_quotes(marks: _Marks, ends: Ints, without_elements: Flags) -> Flags:
    """Flag the elements with special bytes inside their quotes."""
    inside = marks.inside | (marks.dropped & marks.quotes)
    at = marks.at[inside & ~without_elements[marks.row]]
    needed = np.zeros(len(ends), np.bool_)
    needed[np.searchsorted(ends, at, "right")] = True
    return needed


def _nulls(source: ByteBuffer, starts: Ints, ends: Ints) -> tuple[Flags, Flags]:
    """Return masks of elements that are ``NULL``, and of those that are in any mixture of cases."""
    is_null = np.zeros(len(starts), np.bool_)
    looks_null = is_null.copy()
    four = np.flatnonzero(ends - starts == _NULL_LENGTH)
    if len(four):
        words = source.int32_at(starts[four])
        is_null[four] = words == _NULL
        looks_null[four] = words | _TO_LOWER == _NULL | _TO_LOWER
    return is_null, looks_null


def _without(
    dropped: Ints, content: bytes, starts: Ints, ends: Ints
) -> tuple[ByteBuffer, Ints, Ints]:
    """Remove these bytes."""
    kept = np.ones(len(content), np.bool_)
    kept[dropped] = False
    source = ByteBuffer(np.frombuffer(content, np.uint8)[kept].tobytes())
    starts = starts - np.searchsorted(dropped, starts)
    return source, starts, ends - np.searchsorted(dropped, ends)
