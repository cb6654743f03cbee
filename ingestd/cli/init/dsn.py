"""The connection string that `ingestd init` is given, and where its password goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ingestd.config.interpolation import Interpolator
from ingestd.model.errors import ConfigError
from ingestd.postgres.settings import SECRET_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class GivenDsn:
    """A connection string, `value`, as it is given (`text`): itself, ``env:NAME``, ``file:PATH``.

    `folder`: that of the config, which relative paths are relative to.
    """

    text: str
    value: str
    folder: Path

    def __repr__(self) -> str:
        return "GivenDsn()"

    @property
    def is_reference(self) -> bool:
        """Whether the config can have it as it is given."""
        return self.text != self.value

    @property
    def has_secret(self) -> bool:
        """Whether it holds a password that nobody is to find in a config."""
        return not self.is_reference and bool(
            set(SECRET_PARTS) & conninfo_to_dict(self.value).keys()
        )

    def with_password(self, password: str) -> GivenDsn:
        """Return it with a password that was asked for."""
        value = make_conninfo(self.value, password=password)
        return GivenDsn(value, value, self.folder)

    def secret_path(self, source: str) -> Path | None:
        """Name the file that takes it, beside the config; None where it goes into the config."""
        return self.folder / f"{source}.dsn" if self.has_secret else None

    def in_config(self, source: str) -> str:
        """Return what the config says."""
        path = self.secret_path(source)
        return self.text if path is None else f"file:{path.name}"


def given_dsn(text: str, folder: Path, environ: Mapping[str, str]) -> GivenDsn:
    """Resolve it. Raises ConfigError, which never quotes it."""
    resolver = Interpolator(folder, environ)
    value = str(resolver.resolve(text, ("--dsn",)))
    for why in resolver.errors.values():
        raise ConfigError(f"--dsn: {why}")
    try:
        conninfo_to_dict(value)
    except psycopg.ProgrammingError:
        # libpq's words quote parts of the string, and they may be the password
        raise ConfigError(
            "--dsn: not a connection string; write postgresql://user@host:5432/dbname, or"
            " env:NAME or file:PATH of one"
        ) from None
    return GivenDsn(text, value, folder)
