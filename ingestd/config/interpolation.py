"""`env:NAME` and `file:PATH` in the values of a config file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KeyPath = tuple[str | int, ...]


@dataclass(slots=True)
class Interpolator:
    """Replaces references by their values, and records where they were.

    `folder`: base of relative file paths. `values`: the value found for each key path; `errors`:
    for each key path without a value, the reason.
    """

    folder: Path
    environ: Mapping[str, str]
    values: dict[KeyPath, str] = field(default_factory=dict, repr=False)
    errors: dict[KeyPath, str] = field(default_factory=dict)

    def resolve(self, value: object, at: KeyPath = ()) -> object:
        """Return the value with every reference replaced. One that fails is left unchanged."""
        if isinstance(value, dict):
            return {k: self.resolve(v, (*at, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.resolve(v, (*at, i)) for i, v in enumerate(value)]
        if isinstance(value, str) and value.startswith("env:"):
            return self._env(value, at)
        if isinstance(value, str) and value.startswith("file:") and not value.startswith("file://"):
            return self._file(value, at)
        return value

    def _env(self, reference: str, at: KeyPath) -> str:
        name = reference.removeprefix("env:")
        if name not in self.environ:
            self.errors[at] = (
                f"environment variable {name} is not set" if name else "'env:' names no variable"
            )
            return reference
        self.values[at] = self.environ[name]
        return self.values[at]

    def _file(self, reference: str, at: KeyPath) -> str:
        name = reference.removeprefix("file:")
        try:
            # one newline, which editors append; a secret may end in a space
            text = (self.folder / name).read_text("utf-8").removesuffix("\n").removesuffix("\r")
        except OSError as error:
            self.errors[at] = f"file {name!r} can't be read: {error.strerror}"
            return reference
        except UnicodeDecodeError:
            self.errors[at] = f"file {name!r} is not UTF-8 text"
            return reference
        self.values[at] = text
        return text


def key_path(at: KeyPath) -> str:
    """Return a key's path in TOML syntax: ``sources.shop.table."public.orders".types``."""
    text = ""
    for part in at:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        bare = part.replace("_", "").replace("-", "")
        # A JSON string is a valid TOML string.
        name = part if bare.isascii() and bare.isalnum() else json.dumps(part, ensure_ascii=False)
        text += f".{name}" if text else name
    return text
