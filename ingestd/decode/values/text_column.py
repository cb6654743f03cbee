"""Text values scattered in a buffer, and their collection into arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode import native

if TYPE_CHECKING:
    from ingestd.decode.values.encodings import Encoding

_WORD = 8


class ByteBuffer:
    """A buffer that can be read as bytes, as unaligned big-endian integers, and by Arrow.

    The view of integers has one item per byte, so an offset is an index; reading eight bytes takes
    no longer than reading two. Reading beyond the buffer returns arbitrary bytes of it, or zeros:
    the caller checks the offsets afterwards. They must not be negative. (The view is indexed,
    because `take` would copy all of it.)

    `encoding`: of its texts, None for UTF-8; see `ingestd.decode.values.encodings.recoded`.
    """

    __slots__ = ("_words", "arrow", "buffer", "data", "encoding")

    def __init__(self, buffer: bytes, encoding: Encoding | None = None) -> None:
        self.buffer = buffer
        self.encoding = encoding
        self.arrow = pa.py_buffer(buffer)
        padded = buffer if len(buffer) >= _WORD else buffer.ljust(_WORD, b"\0")
        self.data: NDArray[np.uint8] = np.frombuffer(padded, np.uint8)
        self._words = np.ndarray((len(padded) - (_WORD - 1),), ">i8", padded, 0, (1,))

    @property
    def plain(self) -> ByteBuffer:
        """The same bytes, as UTF-8."""
        return ByteBuffer(self.buffer)

    def bytes_at(self, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes at these offsets."""
        return self.data.take(offsets, mode="clip")

    def int16_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the signed big-endian 16-bit integers at these offsets."""
        return self.int64_at(offsets) >> 48

    def int32_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the signed big-endian 32-bit integers at these offsets."""
        return self.int64_at(offsets) >> 32

    def int64_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the signed big-endian 64-bit integers at these offsets; zeros follow the end."""
        if native.compiled is not None:
            words = np.empty(len(offsets), np.int64)
            native.compiled.words(self.buffer, np.ascontiguousarray(offsets, np.int64), words)
            return words
        last = len(self._words) - 1
        if len(offsets) == 0 or offsets.max() <= last:
            return self._words[offsets].astype(np.int64)
        found: NDArray[np.int64] = self._words[np.minimum(offsets, last)].astype(np.int64)
        return found << 8 * np.clip(offsets - last, 0, _WORD - 1)


@dataclass(frozen=True, slots=True)
class TextColumn:
    """One column's values: `lengths` bytes from `starts` (int64), which ascend.

    `present` is False for a missing value (its length is 0); None: all present. `heads`: if read,
    numbers whose three lowest bytes are the first three bytes of each present value.
    """

    source: ByteBuffer
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    present: NDArray[np.bool_] | None = None
    heads: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> TextColumn:
        present = None if self.present is None else self.present[rows]
        heads = None if self.heads is None else self.heads[rows]
        return TextColumn(self.source, self.starts[rows], self.lengths[rows], present, heads)

    def at(self, row: int) -> bytes:
        """Return one value."""
        start = int(self.starts[row])
        return self.source.buffer[start : start + int(self.lengths[row])]

    def first(self) -> NDArray[np.uint8]:
        """Return the byte at each start; undefined for absent or empty values."""
        return self._near(0)

    def second(self) -> NDArray[np.uint8]:
        """Return the byte after the first."""
        return self._near(1)

    def third(self) -> NDArray[np.uint8]:
        """Return the byte after the second."""
        return self._near(2)

    def headed(self) -> TextColumn:
        """Return the column with `heads`."""
        if self.heads is not None:
            return self
        heads = self.source.int64_at(self.starts) >> 40
        return TextColumn(self.source, self.starts, self.lengths, self.present, heads)

    def _near(self, offset: int) -> NDArray[np.uint8]:
        if self.heads is None:
            return self.source.bytes_at(self.starts + offset)
        return (self.heads >> (16 - 8 * offset)).astype(np.uint8)

    @property
    def validity(self) -> pa.Buffer | None:
        """Arrow's bitmap of the present values."""
        return None if self.present is None else bitmap(self.present)

    def without(self, odd: NDArray[np.bool_]) -> TextColumn:
        """Return the column with these values absent."""
        if not odd.any():
            return self
        present = ~odd if self.present is None else self.present & ~odd
        return TextColumn(
            self.source, self.starts, np.where(odd, 0, self.lengths), present, self.heads
        )

    def gather(self) -> pa.BinaryArray:
        """Copy the values to a separate array, which shares no memory with the buffer."""
        rows = len(self.starts)
        if rows == 0:
            return pa.array([], pa.binary())
        if native.compiled is not None:
            buffers = [self.validity, *self._copied(native.compiled)]
            return pa.BinaryArray.from_buffers(pa.binary(), rows, buffers)
        offsets = np.empty(2 * rows, np.int32)  # value, gap, value, gap, ..., value
        offsets[0::2] = self.starts
        offsets[1::2] = self.starts + self.lengths
        spread = pa.BinaryArray.from_buffers(
            pa.binary(), 2 * rows - 1, [None, pa.py_buffer(offsets), self.source.arrow]
        )
        every_second = pa.array(np.arange(0, 2 * rows, 2, dtype=np.int32))
        values = pc.take(spread, every_second, boundscheck=False)
        if self.present is None:
            return values
        return pa.BinaryArray.from_buffers(
            pa.binary(), rows, [self.validity, *values.buffers()[1:]]
        )

    def unhex(
        self, compiled: native.NativeFunctions
    ) -> tuple[pa.Buffer, pa.Buffer, NDArray[np.bool_]]:
        """Return offsets and bytes of the decoded bytea texts, and a mask of invalid ones."""
        offsets = np.empty(len(self.starts) + 1, np.int32)
        odd = np.empty(len(self.starts), np.bool_)
        data = pa.allocate_buffer(int(self.lengths.sum()) // 2)
        starts = np.ascontiguousarray(self.starts, np.int64)
        lengths = np.ascontiguousarray(self.lengths, np.int64)
        compiled.unhex(self.source.buffer, starts, lengths, offsets, odd, data)
        return pa.py_buffer(offsets), data, odd

    def _copied(self, compiled: native.NativeFunctions) -> tuple[pa.Buffer, pa.Buffer]:
        """Return offsets and bytes of the values."""
        offsets = np.empty(len(self.starts) + 1, np.int32)
        data = pa.allocate_buffer(int(self.lengths.sum()))
        starts = np.ascontiguousarray(self.starts, np.int64)
        lengths = np.ascontiguousarray(self.lengths, np.int64)
        compiled.gather(self.source.buffer, starts, lengths, offsets, data)
        return pa.py_buffer(offsets), data


def texts_of(values: pa.BinaryArray) -> TextColumn:
    """Return the texts of an array without offset."""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(values) + 1).astype(np.int64)
    present = None
    if values.null_count:
        present = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    content = b"" if data is None else data.to_pybytes()
    return TextColumn(ByteBuffer(content), bounds[:-1], np.diff(bounds), present)


def bitmap(mask: NDArray[np.bool_]) -> pa.Buffer:
    """Return Arrow's bitmap of a mask."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the tuples: its texts, and a mask of unchanged, unsent TOAST values."""

    texts: TextColumn
    unchanged: NDArray[np.bool_] | None = None

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> Field:
        unchanged = None if self.unchanged is None else self.unchanged[rows]
        return Field(self.texts[rows], unchanged)
