"""`where`: the columns that it reads, and the files and rows that it excludes before the fold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from ingestd.model.errors import ConfigError, did_you_mean
from ingestd.reading.raw_files import old_keys

_NUMBER = "_cdc_number"
_BY_INDEX = re.compile(r"FieldPath\(\d")
"""A column by its number, as Arrow prints it. (A text that looks the same is refused as well.)"""
_UNKNOWN = re.compile(r"FieldRef\.Name\((.*?)\) in ", re.DOTALL)


class RowCondition:
    """A condition on current rows. `schema`: of these; `key`: their key's columns.

    Raise ConfigError for a column that does not exist or is given by its number, and for an
    expression that has no truth value for these types.
    """

    def __init__(self, expression: pc.Expression, schema: pa.Schema, key: Sequence[str]) -> None:
        if not isinstance(expression, pc.Expression):
            msg = (
                f"where: a {type(expression).__name__} is no condition: write it as"
                " pyarrow.compute.field('id') > 5"
            )
            raise ConfigError(msg)
        if _BY_INDEX.search(str(expression)):  # rows to be folded have other columns
            msg = (
                f"where: {expression}: name each column, as in pyarrow.compute.field('id'): a"
                " column by its number is not the same one in every file"
            )
            raise ConfigError(msg)
        self.expression = expression
        self._key = tuple(key)
        self._schema = schema
        self._ensure_valid()
        self.columns = tuple(n for n in schema.names if not self._is_valid_without(n))
        """The columns that it reads."""
        self.reads_only_key = set(self.columns) <= set(self._key)

    def _ensure_valid(self) -> None:
        try:
            self._schema.empty_table().filter(self.expression)
        except pa.ArrowException as error:
            found = _UNKNOWN.search(str(error))
            if found is None:
                raise ConfigError(f"where: {str(error).splitlines()[0]}") from error
            name = found[1]
            hint = did_you_mean(name, self._schema.names)
            msg = f"where: there is no column {name!r}: {hint}the table has {self._shown()}"
            raise ConfigError(msg) from error

    def _shown(self) -> str:
        return ", ".join(self._schema.names)

    def _is_valid_without(self, name: str) -> bool:
        others = pa.schema([each for each in self._schema if each.name != name])
        try:
            others.empty_table().filter(self.expression)
        except pa.ArrowException:
            return False
        return True

    def may_match(self, bounds: Mapping[str, tuple[object, object]]) -> bool:
        """Return whether a row whose key is within these bounds, by column, may meet the condition.

        Bounds that are no values of their column, such as None, are ignored.
        """
        guarantee: pc.Expression | None = None
        for name, (first, last) in bounds.items():
            kind = self._schema.field(name).type
            if not _is_bound(first, kind) or not _is_bound(last, kind):
                continue
            column = pc.field(name)
            above = (column >= pa.scalar(first, kind)) | column.is_null()
            below = (column <= pa.scalar(last, kind)) | column.is_null()
            both = above & below
            guarantee = both if guarantee is None else guarantee & both
        if guarantee is None:
            return True
        form, files = ds.ParquetFileFormat(), fs.LocalFileSystem()
        fragment = form.make_fragment("file", filesystem=files, partition_expression=guarantee)
        dataset = ds.FileSystemDataset([fragment], self._schema, form, files)
        return any(True for _ in dataset.get_fragments(self.expression))

    def rows_to_fold(self, rows: pa.Table) -> pa.Table:
        """Return the change rows whose key, or old key, may meet the condition.

        Only if it `reads_only_key`. A key with a null stays: its value may be a text.
        """
        keys = rows.select(list(self._key))
        keep = _meets(keys, self.expression)
        before = rows["_cdc_before"]
        if before.null_count < len(before):
            keep = pc.or_(keep, _meets(old_keys(rows, self._key), self.expression))
        return rows.filter(keep)


def _is_bound(value: object, kind: pa.DataType) -> bool:
    """Return whether a bound from a log, which is JSON, is a value of a type."""
    if pa.types.is_signed_integer(kind):
        return type(value) is int and -(1 << kind.bit_width - 1) <= value < 1 << kind.bit_width - 1
    return type(value) is str and pa.types.is_string(kind)


def _meets(keys: pa.Table, expression: pc.Expression) -> pa.Array:
    """Return which keys meet a condition, or have a null."""
    flags = np.zeros(keys.num_rows, bool)
    numbered = keys.append_column(_NUMBER, pa.array(np.arange(keys.num_rows)))
    flags[numbered.filter(expression)[_NUMBER].to_numpy()] = True
    for column in keys.columns:
        if column.null_count:
            flags |= column.is_null().to_numpy(zero_copy_only=False)
    return pa.array(flags)
