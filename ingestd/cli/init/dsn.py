"""The connection string given to `ingestd init`, and the file for its password."""

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
    """A connection string, `value`; `text`: as given, also as ``env:NAME`` or ``file:PATH``.

    `folder`: the config's folder, the base of relative paths.
    """

    text: str
    value: str
    folder: Path

    def __repr__(self) -> str:
        return "GivenDsn()"

    @property
    def is_reference(self) -> bool:
        """True for ``env:NAME`` and ``file:PATH``, which the config can contain as given."""
        return self.text != self.value

    @property
    def has_secret(self) -> bool:
        """True if it contains a password, which must not go into the config."""
        return not self.is_reference and bool(
            set(SECRET_PARTS) & conninfo_to_dict(self.value).keys()
        )

    def with_password(self, password: str) -> GivenDsn:
        """Return the connection string with this password added."""
        value = make_conninfo(self.value, password=password)
        return GivenDsn(value, value, self.folder)

    def secret_path(self, source: str) -> Path | None:
        """Return the path of the secret file beside the config; None if none is needed."""
        return self.folder / f"{source}.dsn" if self.has_secret else None

    def in_config(self, source: str) -> str:
        """Return the value of `dsn` in the config."""
        path = self.secret_path(source)
        return self.text if path is None else f"file:{path.name}"


def given_dsn(text: str, folder: Path, environ: Mapping[str, str]) -> GivenDsn:
    """Resolve a connection string. Raises ConfigError, which never quotes it."""
    resolver = Interpolator(folder, environ)
    value = str(resolver.resolve(text, ("--dsn",)))
    for why in resolver.errors.values():
        raise ConfigError(f"--dsn: {why}")
    try:
        conninfo_to_dict(value)
    except psycopg.ProgrammingError:
        # libpq's message quotes parts of the string, possibly the password
        raise ConfigError(
            "--dsn: not a connection string; write postgresql://user@host:5432/dbname, or"
            " env:NAME or file:PATH of one"
        ) from None
    return GivenDsn(text, value, folder)
