"""Rows of text under headings: a rich table on a terminal, plain columns elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ingestd.model.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Grid:
    """`rows`: a text for each heading. `numeric`: headings of right-aligned columns.

    `styles`: a cell's style by its text.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Collection[str] = ()
    styles: dict[str, str] = field(default_factory=dict)

    def print(self, out: Console, indent: int = 0) -> None:
        """Print the grid. Plain columns are never cut or wrapped, so that they can be searched."""
        if out.is_terminal:
            out.print(Padding.indent(self._table(), indent))
            return
        for line in self.lines():
            out.print(Text(" " * indent + line), soft_wrap=True)

    def lines(self) -> Iterator[str]:
        """Yield the plain form, line by line."""
        rows = [list(map(printable, row)) for row in [self.headings, *self.rows]]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = zip(self.headings, row, widths, strict=True)
            yield "  ".join(self._padded(*cell) for cell in cells).rstrip()

    def _padded(self, heading: str, text: str, width: int) -> str:
        space = " " * (width - cell_len(text))
        return space + text if heading in self.numeric else text + space

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for heading in self.headings:
            justify = "right" if heading in self.numeric else "left"
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(printable(t), style=self.styles.get(t, "")) for t in row))
        return table
