"""The sections of the daemon: lake, epochs, limits, maintenance, HTTP, log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from ingestd.config.base import Section
from ingestd.config.errors import KeyPathError
from ingestd.config.units import Address, Seconds, SecondsOrOff, SizeBytes, address, is_loopback

_STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl")
_SCHEMES = (*_STORES, "file")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,}={0,2}\Z")
"""RFC 6750, section 2.1. A minimum length, because short tokens can be guessed."""


def _sendable(value: SecretStr) -> SecretStr:
    if not _TOKEN.match(value.get_secret_value()):
        msg = "is not a token: 16 or more of A-Z a-z 0-9 . _ ~ + / -, as of: openssl rand -hex 32"
        raise ValueError(msg)
    return value


def _pem_path(value: str) -> str:
    if not value or "\n" in value or "-----" in value:
        msg = "is not a path; name the PEM file, without 'file:'"
        raise ValueError(msg)
    return value


Token = Annotated[SecretStr, AfterValidator(_sendable)]
PemPath = Annotated[str, AfterValidator(_pem_path)]


class LakeSettings(Section):
    """`uri`: a local path, or a URI that deltalake supports. `storage_options`: passed to it."""

    kind: ClassVar[str] = "delta"
    """The lake's name in `ingestd.app.lakes`; not a key of the file while there is one kind."""

    uri: str
    """Where the Delta tables are stored: a folder, or a URI such as `s3://`, `gs://`, `az://` or
    `abfss://`."""
    storage_options: dict[str, SecretStr] = Field(default_factory=dict)
    """Passed to deltalake unchanged; the values are never shown."""

    @field_validator("uri")
    @classmethod
    def _usable(cls, uri: str) -> str:
        scheme, separator, rest = uri.partition("://")
        if not uri.strip() or (separator and not rest):
            msg = "is empty; write a path or a URI like 's3://bucket/prefix'"
            raise ValueError(msg)
        if separator and scheme not in _SCHEMES:
            msg = f"unknown scheme; use a path or one of {', '.join(_SCHEMES)}"
            raise ValueError(msg)
        if uri.startswith(tuple(f"{name}:/" for name in _STORES)) and not separator:
            store_uri = uri.replace(":/", "://", 1)
            msg = f"is not a path; write {store_uri!r} for a store"
            raise ValueError(msg)
        if uri.startswith("~"):
            try:
                uri = str(Path(uri).expanduser())
            except RuntimeError:
                msg = "the home directory in it is unknown; write the full path"
                raise ValueError(msg) from None
        if "%" in uri and scheme in (uri, "file"):
            msg = "deltalake can't use a local path with '%' in it; choose another"
            raise ValueError(msg)
        return uri.rstrip("/") or "/"


class EpochSettings(Section):
    """When an epoch is closed: `max_delay` seconds after its first change, or at `max_bytes`."""

    max_delay: Seconds = 5.0
    """An epoch is closed at most this long after its first change."""
    max_bytes: SizeBytes = 64_000_000
    """An epoch is closed when it reaches this many bytes."""


class LimitSettings(Section):
    """`memory`: bytes for buffers and decoding, for the whole process."""

    memory: SizeBytes = Field(default=512_000_000, ge=64_000_000)
    """Memory for buffers and decoding in the whole process, shared by its sources."""


class MaintenanceSettings(Section):
    """Maintenance of the lake, alongside the epochs (docs/maintenance.md).

    `compact`: interval in seconds at which small files are compacted; None: never.
    `target_file_size`: size in bytes up to which files are compacted. `retention`: how many seconds
    of versions stay readable; None: all.
    """

    compact: SecondsOrOff = 3600.0
    """How often small files of the lake are compacted."""
    target_file_size: SizeBytes | None = Field(default=None, ge=1_000_000, le=2_000_000_000)
    """Target size of compacted files; a file smaller than a quarter of it is small."""
    retention: SecondsOrOff = 7 * 86400.0
    """How long versions of the lake's tables stay readable; at least 10m, off keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> MaintenanceSettings:
        if self.compact is None and self.target_file_size is not None:
            why = 'has no effect with compact = "off"; remove one of the two'
            raise KeyPathError(("target_file_size",), why)
        if self.retention is not None and self.retention < LEAST_RETENTION_S:
            why = "readers that are further behind can't resume; write at least 10m, or 'off'"
            raise KeyPathError(("retention",), why)
        return self

    @property
    def target_bytes(self) -> int | None:
        """Target size of compacted files; None: files are not compacted."""
        if self.compact is None:
            return None
        return DEFAULT_TARGET_BYTES if self.target_file_size is None else self.target_file_size


LEAST_RETENTION_S = 600.0
DEFAULT_TARGET_BYTES = 128_000_000


_SCHEMA_NAME = re.compile(r"(?:[a-z0-9_]|\{source\})+\Z", re.ASCII)


class CatalogSettings(Section):
    """`[catalog]`: a catalog in which the lake's tables have names (docs/catalogs.md)."""

    kind: Literal["unity", "glue"]
    """unity: Unity Catalog's REST API; glue: AWS Glue's Data Catalog."""
    uri: str | None = None
    """unity: the API, such as `https://host/api/2.1/unity-catalog`; glue: an endpoint other than
    AWS's."""
    catalog: str | None = None
    """unity: the catalog, which must exist."""
    schema_name: str = "{source}_raw"
    """The schema (Glue: database) of a source's tables; it is created. `{source}` is the source's
    name."""
    token: Token | None = None
    """unity: sent as `Authorization: Bearer ...`; only by https, or to this machine."""
    region: str | None = None
    """glue: the region; by default that of the environment."""
    timeout: Seconds = 30.0
    """How long a request may take."""

    @model_validator(mode="after")
    def _consistent(self) -> CatalogSettings:
        if not _SCHEMA_NAME.match(self.schema_name):
            raise KeyPathError(("schema_name",), "has other characters than a-z 0-9 _ and {source}")
        of_unity, of_glue = ("uri", "catalog", "token"), ("region",)
        needs = of_unity[:2] if self.kind == "unity" else ()
        has_not = of_glue if self.kind == "unity" else of_unity[1:]
        for name in needs:
            if not getattr(self, name):
                raise KeyPathError((name,), f"is needed with kind = {self.kind!r}")
        for name in has_not:
            if getattr(self, name) is not None:
                raise KeyPathError((name,), f"has no effect with kind = {self.kind!r}")
        self._check_uri()
        return self

    def _check_uri(self) -> None:
        if self.uri is None:
            return
        found = urlsplit(self.uri)
        if found.scheme not in {"http", "https"} or not found.hostname or "@" in found.netloc:
            raise KeyPathError(("uri",), "is not an http:// or https:// URL of a host")
        if self.token is not None and found.scheme == "http" and not is_loopback(found.hostname):
            raise KeyPathError(("uri",), "must be https://, as the token is sent to it")

    def schema_of(self, source: str) -> str:
        """Return the schema of a source's tables."""
        return self.schema_name.replace("{source}", source)


class HttpSettings(Section):
    """`listen`: address of /metrics, /healthz, /readyz and /status; None: none is served.

    `token`: required by all endpoints except /healthz. `tls_cert`, `tls_key`: PEM files, relative
    to the working directory of the daemon.
    """

    listen: Annotated[Address | None, BeforeValidator(address)] = Address("127.0.0.1", 9464)
    """Where /metrics, /healthz, /readyz, /status and the page are served; off disables them."""
    token: Token | None = None
    """Token that requests must send (`Authorization: Bearer ...`), except to /healthz. If not set,
    commands need the token that each start generates (docs/deploy.md)."""
    tls_cert: PemPath | None = None
    """PEM file of the certificate, relative to the working directory; needs `tls_key`."""
    tls_key: PemPath | None = None
    """PEM file of the certificate's key, not encrypted; needs `tls_cert`."""

    @model_validator(mode="after")
    def _consistent(self) -> HttpSettings:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise KeyPathError((name,), f"needs {other!r} too")
        if self.listen is None:
            for name in ("token", "tls_cert"):
                if getattr(self, name) is not None:
                    raise KeyPathError((name,), 'has no effect with listen = "off"')
        return self


class LogSettings(Section):
    """`format`: auto selects json unless stderr is a terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    format: Literal["auto", "json", "pretty"] = "auto"
    """auto selects json unless stderr is a terminal."""
