"""The text of a first config: the chosen settings, and likely next ones as comments."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingestd.cli.init.store_options import store_options
from ingestd.model.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingestd.cli.init.cursor_columns import ProposedCursor

_WIDTH = 77
_EXAMPLE = "public.orders"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A table that can't be captured yet: the `pattern` that excludes it, reason and remedy."""

    pattern: str
    reason: str
    remedy: str | None


@dataclass(frozen=True, slots=True)
class FirstConfig:
    """The content of a first config.

    `database`: its description. `dsn`: as written into the config. `manage`: None for polling.
    `why_not_wal`: reasons why the database can't be captured from its WAL, with remedies. `table`:
    a captured table, for examples. `cursors`: for polling.
    """

    source: str
    database: str
    lake: str
    dsn: str
    kind: str
    manage: bool | None
    patterns: Sequence[str]
    left_out: Sequence[LeftOut] = ()
    why_not_wal: Sequence[tuple[str, str | None]] = ()
    table: str | None = None
    cursors: Sequence[ProposedCursor] = ()

    def text(self) -> str:
        """Return the TOML text."""
        cursors = [self._cursor(cursor) for cursor in self.cursors]
        parts = [self._head(), self._lake(), _RIM, self._source(), *cursors, self._table()]
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _head(self) -> Iterator[str]:
        yield from _comment(f"Written by `ingestd init` for {self.database}.")
        yield from _comment("All keys: docs/reference/configuration.md")

    def _lake(self) -> Iterator[str]:
        yield "[lake]"
        yield f"uri = {toml(self.lake)}"
        yield from store_options(self.lake)

    def _source(self) -> Iterator[str]:
        yield f"[sources.{self.source}]"
        if self.kind == "wal":
            yield from _comment("Every change, from the write-ahead log.")
        else:
            yield from _comment("Changes are found by ordinary queries: docs/polling.md")
        for what, remedy in self.why_not_wal:
            yield from _comment(f'kind = "wal" is not possible: {what}')
            yield from _remedy(remedy)
        yield f"kind = {toml(self.kind)}"
        if self.dsn.startswith("file:"):
            yield from _comment('Only this account can read the file; "env:NAME" works too.')
        yield f"dsn = {toml(self.dsn)}"
        yield from self._patterns()
        if self.manage is None:
            yield 'interval = "10s"'
        else:
            yield from self._slot()
        yield 'snapshot = "initial"      # existing rows first; "never": changes only'

    def _patterns(self) -> Iterator[str]:
        yield "tables = ["
        excluded = {found.pattern for found in self.left_out}
        for pattern in self.patterns:
            if pattern not in excluded:
                yield f"  {toml(pattern)},"
        for found in self.left_out:
            yield from (f"  {line}" for line in _comment(found.reason))
            yield from (f"  {line}" for line in _remedy(found.remedy))
            yield f"  {toml(found.pattern)},"
        yield "]"

    def _slot(self) -> Iterator[str]:
        name = toml(f"ingestd_{self.source}")
        yield f"slot = {name}"
        yield f"publication = {name}"
        if self.manage:
            yield "manage = true             # ingestd creates and alters slot and publication"
        else:
            yield "manage = false            # both exist; ingestd alters neither"
        yield '# ddl_log = "event_trigger" # write DDL into the WAL: docs/ddl.md'

    def _cursor(self, cursor: ProposedCursor) -> Iterator[str]:
        mark = ""
        if cursor.index is not None:
            yield from _comment("With this index, a poll need not scan the complete table:")
            yield from _remedy(cursor.index)
            mark = "# "
        yield f"{mark}[sources.{self.source}.table.{toml(str(cursor.table))}]"
        yield f"{mark}cursor = {toml(cursor.column)}     # does it increase with every write?"
        yield '# detect_deletes = "1h"     # how often to search for deleted rows'

    def _table(self) -> Iterator[str]:
        if self.cursors:
            yield from _comment("Other options of a table:")
        else:
            yield from _comment("Options of a table:")
            yield f"# [sources.{self.source}.table.{toml(self.table or _EXAMPLE)}]"
        if self.manage is None and not self.cursors:
            yield '# cursor = "updated_at"     # an indexed column that increases with every write'
            yield '# detect_deletes = "1h"     # how often to search for deleted rows'
        yield '# exclude_columns = ["note"]'
        yield '# mask_columns = { email = "sha256" }   # needs mask_key in the source'


_RIM = (
    "[epoch]",
    'max_delay = "5s"          # how long after their commit rows are in the lake',
    "",
    "[http]",
    'listen = "127.0.0.1:9464" # status page, /metrics, /readyz',
)


def toml(text: str) -> str:
    """Return a TOML basic string: JSON's syntax, with DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _comment(text: str) -> Iterator[str]:
    lines = textwrap.wrap(printable(text), _WIDTH - 2, break_long_words=False)
    return (f"# {line}" for line in lines)


def _remedy(remedy: str | None) -> Iterator[str]:
    """Yield a remedy as comments, unwrapped, so that it can be pasted."""
    return (f"#   {printable(line)}" for line in (remedy or "").splitlines())
