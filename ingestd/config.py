"""The configuration: a TOML file, checked whole before anything starts (design section 4).

Sizes: MB is 10^6 bytes, MiB 2^20. A relative `lake.uri` is relative to the working directory of
the daemon; a relative `file:` path to the folder of the config file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from ingestd.config_errors import KeyPathError, Problem, describe, problems_of
from ingestd.errors import ConfigError
from ingestd.quantities import Address, Seconds, SecondsOrOff, SizeBytes, address
from ingestd.redaction import MASK, Redactor, secrets_in_environment
from ingestd.references import KeyPath, Resolver
from ingestd.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "file")
_SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,54}\Z")
_SECRET_OPTION = re.compile(r"key|secret|token|password|credential|sas|account", re.IGNORECASE)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,}={0,2}\Z")
"""RFC 6750, section 2.1; shorter ones can be guessed."""
_TELLING_LENGTH = 8
"""A shorter word (a region, 'true') is no secret by itself."""


def _not_empty(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().strip():
        msg = "is empty"
        raise ValueError(msg)
    return value


Secret = Annotated[SecretStr, AfterValidator(_not_empty)]


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


class Section(BaseModel):
    """A table of the config file: strict types, no unknown keys, nothing secret in its repr."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)
    _hidden: set[str] = PrivateAttr(default_factory=set)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Give what the repr shows: a value that came by env: or file: is masked."""
        for name, value in super().__repr_args__():
            yield name, MASK if name in self._hidden else value


class LakeSettings(Section):
    """`uri`: a local path, or a URI that deltalake knows. `storage_options`: passed to it."""

    uri: str
    """Where the Delta tables go: a folder, or `s3://`, `gs://`, `az://`, `abfss://` and their
    like."""
    storage_options: dict[str, SecretStr] = {}
    """Passed to deltalake as they are; their values are never shown."""

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
        if "%" in uri and scheme in (uri, "file"):
            msg = "deltalake can't use a local path with '%' in it; choose another"
            raise ValueError(msg)
        return uri.rstrip("/") or "/"


class EpochSettings(Section):
    """When an epoch closes: `max_delay` seconds after its first change, or at `max_bytes`."""

    max_delay: Seconds = 5.0
    """An epoch closes at most this long after its first change."""
    max_bytes: SizeBytes = 64_000_000
    """An epoch closes when it has this many bytes."""


class LimitSettings(Section):
    """`memory`: bytes for buffers and decoding, of the whole process."""

    memory: SizeBytes = Field(default=512_000_000, ge=64_000_000)
    """For buffers and decoding, in the whole process, shared by its sources."""


class MaintenanceSettings(Section):
    """What is done to the lake beside the epochs (docs/maintenance.md).

    `compact`: how often small files are joined, in seconds; None: never. `target_file_size`: bytes
    of a file that is not joined any more, up to which files are. `retention`: how many seconds of
    versions can be read; None: all.
    """

    compact: SecondsOrOff = 3600.0
    """How often small files of the lake are joined."""
    target_file_size: SizeBytes | None = Field(default=None, ge=1_000_000, le=2_000_000_000)
    """How large such files become; a file below a quarter of it is small."""
    retention: SecondsOrOff = 7 * 86400.0
    """How long versions of the lake's tables can be read; at least 10m, off keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> MaintenanceSettings:
        if self.compact is None and self.target_file_size is not None:
            why = 'is for joining files, and compact = "off" joins none; take one of them out'
            raise KeyPathError(("target_file_size",), why)
        if self.retention is not None and self.retention < LEAST_RETENTION_S:
            why = "readers that are further behind lose their place; at least 10m, or 'off'"
            raise KeyPathError(("retention",), why)
        return self

    @property
    def target_bytes(self) -> int | None:
        """Size of files that small ones become; None: they stay."""
        if self.compact is None:
            return None
        return DEFAULT_TARGET_BYTES if self.target_file_size is None else self.target_file_size


LEAST_RETENTION_S = 600.0
DEFAULT_TARGET_BYTES = 128_000_000


class HttpSettings(Section):
    """`listen`: where /metrics, /healthz, /readyz and /status are; None: nowhere.

    `token`: what all but /healthz ask for. `tls_cert`, `tls_key`: PEM files, relative to the
    working directory of the daemon.
    """

    listen: Annotated[Address | None, BeforeValidator(address)] = Address("127.0.0.1", 9464)
    """Where /metrics, /healthz, /readyz, /status and the page are served; off serves nothing."""
    token: Token | None = None
    """What requests have to bring (`Authorization: Bearer ...`); not asked for /healthz."""
    tls_cert: PemPath | None = None
    """PEM file of the certificate, relative to the working directory; needs `tls_key`."""
    tls_key: PemPath | None = None
    """PEM file of its key, not encrypted; needs `tls_cert`."""

    @model_validator(mode="after")
    def _consistent(self) -> HttpSettings:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise KeyPathError((name,), f"needs {other!r} too")
        if self.listen is None:
            for name in ("token", "tls_cert"):
                if getattr(self, name) is not None:
                    raise KeyPathError((name,), 'is for what listen = "off" does not serve')
        return self


class LogSettings(Section):
    """`format`: auto is json when not a terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""
    format: Literal["auto", "json", "pretty"] = "auto"
    """auto is json when stderr is not a terminal."""


class TableSettings(Section):
    """`[sources.NAME.table."schema.table"]`; columns by the source's names.

    `exclude_columns` never reach the lake. `mask_columns`: only a keyed hash of the value does, or
    nothing. `types`: the lake's type, as `ingestd.decode.types.override_type` reads it.
    `reference`: whether the lake keeps the table's current rows, and how they are kept
    (docs/reference-tables.md); `refresh`: how often, in seconds, "snapshot_only" reads them.
    """

    exclude_columns: list[str] = []
    """Columns that are never read, and never in the lake."""
    mask_columns: dict[str, Literal["sha256", "null"]] = {}
    """Columns of which only a keyed hash reaches the lake (sha256), or nothing (null)."""
    types: dict[str, str] = {}
    """Lake types other than the usual ones, by column (docs/types.md)."""
    reference: Literal["off", "snapshot_only", "snapshot_plus_cdc", "manual"] = "off"
    """Whether `_ref` has the table's current rows, and how (docs/reference-tables.md)."""
    refresh: Seconds | None = None
    """How often a `snapshot_only` table is read anew; 1h if not set."""

    @model_validator(mode="after")
    def _consistent(self) -> TableSettings:
        if self.refresh is not None and self.reference in {"snapshot_plus_cdc", "manual"}:
            why = f'is for reference = "snapshot_only", not "{self.reference}"; take it out'
            raise KeyPathError(("refresh",), why)
        excluded = self.exclude_columns
        for number, column in enumerate(excluded):
            if column in excluded[:number]:
                raise KeyPathError(("exclude_columns", number), f"{column!r} is named twice")
        for column, kind in self.mask_columns.items():
            if column in excluded:
                why = "is in 'exclude_columns' too; take it out of one of them"
                raise KeyPathError(("mask_columns", column), why)
            if kind == "sha256" and column in self.types:
                why = "is masked with sha256, which is a string; take it out of 'types'"
                raise KeyPathError(("types", column), why)
        for column in self.types:
            if column in excluded:
                why = "is in 'exclude_columns' too; take it out of one of them"
                raise KeyPathError(("types", column), why)
        return self

    @property
    def refresh_s(self) -> float:
        """How often a table with "snapshot_only" is read."""
        return DEFAULT_REFRESH_S if self.refresh is None else self.refresh

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the columns whose mask needs a key."""
        return tuple(c for c, kind in self.mask_columns.items() if kind == "sha256")


DEFAULT_REFRESH_S = 3600.0
UNSTREAMED = {"snapshot_only", "manual"}
"""Of these references only the current rows are in the lake."""
NO_CONTROLS = TableSettings()
"""What holds for a table without a section of its own."""


def _table_pattern(pattern: str) -> str:
    try:
        TableId.parse(pattern.removeprefix("!"))
    except ValueError:
        msg = "write it as schema.table, like 'public.*' or '!public.audit_*'"
        raise ValueError(msg) from None
    return pattern


TablePattern = Annotated[str, AfterValidator(_table_pattern)]


class SourceSettings(Section):
    """What every kind of source has; a kind's own model adds its keys.

    `tables`: patterns ``schema.table`` with ``*``, ``?`` and ``[...]``; ``!`` excludes. A schema
    with a dot is quoted as in SQL. `mask_key`: what masks of kind sha256 are keyed with.
    """

    kind: str
    """How changes are captured."""
    dsn: Secret
    """A libpq connection string or URI."""
    tables: list[TablePattern] = Field(min_length=1)
    """What to capture: `schema.table` with `*`, `?` and `[...]`; `!` excludes."""
    mask_key: Secret | None = None
    """What masks of kind sha256 are keyed with; required for them."""
    table: Mapping[str, TableSettings] = {}
    """Settings of single tables: a section each, by `"schema.table"`."""

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Give the defaults that depend on the source's name."""
        del source
        return {}

    def includes(self, schema: str, name: str) -> bool:
        """Say whether `tables` asks for this table: by one pattern, and excluded by none."""
        return included(self.tables, schema, name)

    def streams(self, table: TableId) -> bool:
        """Say whether a table's changes are captured: of some only the current rows are kept."""
        return (
            self.includes(table.schema, table.name)
            and self.controls(table).reference not in UNSTREAMED
        )

    def controls(self, table: TableId) -> TableSettings:
        """Give the settings of a table: those of its section, or the defaults."""
        found = (s for text, s in self.table.items() if TableId.parse(text) == table)
        return next(found, NO_CONTROLS)

    def references(self) -> dict[TableId, TableSettings]:
        """Give the tables whose current rows the lake keeps."""
        return {TableId.parse(n): s for n, s in self.table.items() if s.reference != "off"}

    @property
    def mask_key_bytes(self) -> bytes | None:
        """The key as HMAC takes it: its text in UTF-8."""
        return None if self.mask_key is None else self.mask_key.get_secret_value().encode()

    def exclusive(self) -> tuple[str, object] | None:
        """Name the key that no two sources may share, and what counts as the same."""
        return None

    def secrets(self) -> list[str]:
        """Give the values that nobody may see."""
        fields = (getattr(self, name) for name in type(self).model_fields)
        return [f.get_secret_value() for f in fields if isinstance(f, SecretStr)]

    @model_validator(mode="after")
    def _consistent(self) -> SourceSettings:
        if all(p.startswith("!") for p in self.tables):
            raise KeyPathError(("tables",), "only exclusions; add what to capture, like 'public.*'")
        seen: dict[TableId, str] = {}
        for text, settings in self.table.items():
            at: KeyPath = ("table", text)
            try:
                table = TableId.parse(text)
            except ValueError:
                raise KeyPathError(at, "write it as schema.table, like 'public.orders'") from None
            if not self.includes(table.schema, table.name):
                raise KeyPathError(at, "no pattern of 'tables' includes it")
            if seen.setdefault(table, text) != text:
                raise KeyPathError(at, f"is the table of {seen[table]!r} too; keep one of them")
            if settings.hashed and self.mask_key is None:
                why = "sha256 needs a key; set 'mask_key' of the source, like 'env:MASK_KEY'"
                raise KeyPathError((*at, "mask_columns", settings.hashed[0]), why)
        return self


def included(patterns: Sequence[str], schema: str, name: str) -> bool:
    """Say whether a table is in: by one pattern, and excluded by none."""

    def matches(pattern: str) -> bool:
        wanted = TableId.parse(pattern.removeprefix("!"))
        return fnmatchcase(schema, wanted.schema) and fnmatchcase(name, wanted.name)

    found = [p for p in patterns if matches(p)]
    return bool(found) and not any(p.startswith("!") for p in found)


class Config(Section):
    """The whole file, checked. `redactor` knows every secret in it."""

    lake: LakeSettings
    """Where the tables go."""
    epoch: EpochSettings = EpochSettings()
    """When an epoch closes."""
    limits: LimitSettings = LimitSettings()
    """What the process may take."""
    maintenance: MaintenanceSettings = MaintenanceSettings()
    """What is done to the lake beside the epochs (docs/maintenance.md)."""
    http: HttpSettings = HttpSettings()
    """Where it can be asked, and by whom."""
    log: LogSettings = LogSettings()
    """What is logged, and how."""
    sources: dict[str, SourceSettings] = Field(min_length=1)
    """The databases: a section each, by name."""
    _redactor: Redactor = PrivateAttr(default_factory=Redactor)

    @property
    def redactor(self) -> Redactor:
        """Takes this config's secrets out of any text."""
        return self._redactor


def load_config(
    path: Path, sources: Mapping[str, type[SourceSettings]], environ: Mapping[str, str]
) -> Config:
    """Read and check a config file. `sources`: a kind's settings model, by `kind`.

    Raises ConfigError with every fault found, one line each, that begins with the key's path and
    shows no secret.
    """
    document = _read(path)
    resolver = Resolver(path.parent, environ)
    resolved = resolver.resolve(document)
    if not isinstance(resolved, dict):
        raise TypeError(resolved)
    problems = [Problem(at, why) for at, why in resolver.errors.items()]
    found = _sources(resolved.pop("sources", {}), sources, problems)
    problems += _shared(found)
    config: Config | None = None
    # a placeholder keeps "no sources" from being said of sources that are only wrong
    stand_in = SourceSettings(kind="", dsn=SecretStr("-"), tables=["-.-"])
    try:
        config = Config.model_validate({**resolved, "sources": found or {"-": stand_in}})
    except ValidationError as error:
        problems += problems_of(error, Config, ())
    if problems or config is None:
        raise ConfigError("\n".join(describe(problems, document, resolver)))
    _hide(config, resolver, environ)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        msg = f"{path}: the config file can't be read: {error.strerror}"
        raise ConfigError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{path}: not UTF-8 text"
        raise ConfigError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{path}: not TOML: {error}"
        raise ConfigError(msg) from error


def _sources(
    sections: object, kinds: Mapping[str, type[SourceSettings]], problems: list[Problem]
) -> dict[str, SourceSettings]:
    if not isinstance(sections, dict) or not sections:
        problems.append(Problem(("sources",), "none configured; add a section [sources.NAME]"))
        return {}
    found: dict[str, SourceSettings] = {}
    for name, section in sections.items():
        at: KeyPath = ("sources", name)
        if not _SOURCE_NAME.match(name):
            why = "a source's name is 1-55 of a-z, 0-9 and _, and begins with a letter or digit"
            problems.append(Problem(at, why))
        elif not isinstance(section, dict):
            problems.append(Problem(at, "must be a section [sources.NAME]"))
        elif (model := kinds.get(str(section.get("kind", "")))) is None:
            available = ", ".join(repr(kind) for kind in sorted(kinds))
            what = "unknown or not available" if "kind" in section else "is missing"
            problems.append(Problem((*at, "kind"), f"{what}; available: {available}"))
        else:
            try:
                found[name] = model.model_validate({**model.defaults(name), **section})
            except ValidationError as error:
                problems += problems_of(error, model, at)
    return found


def _shared(sources: Mapping[str, SourceSettings]) -> list[Problem]:
    problems = []
    owners: dict[object, str] = {}
    for name, settings in sources.items():
        claim = settings.exclusive()
        if claim is not None and (owner := owners.setdefault(claim, name)) != name:
            why = f"the same as in sources.{owner}, on the same database"
            problems.append(Problem(("sources", name, claim[0]), why))
    return problems


def _hide(config: Config, resolver: Resolver, environ: Mapping[str, str]) -> None:
    """Mask what came by reference in reprs, and tell the redactor every secret."""
    known = [secret for source in config.sources.values() for secret in source.secrets()]
    known += secrets_in_environment(environ)
    if config.http.token is not None:
        known.append(config.http.token.get_secret_value())
    for name, option in config.lake.storage_options.items():
        value = option.get_secret_value()
        # a region or "true" is no secret; masking it would mask half of every log line
        if _SECRET_OPTION.search(name) or len(value) >= _TELLING_LENGTH:
            known.append(value)
    for at, value in resolver.values.items():
        section, name = _field_at(config, at)
        section._hidden.add(name)  # noqa: SLF001 - a Section's own, as this module's
        is_free_text = type(section).model_fields[name].annotation is str
        if is_free_text and len(value) >= _TELLING_LENGTH:
            known.append(value)
    config._redactor = Redactor(known)  # noqa: SLF001


def _field_at(config: Config, at: KeyPath) -> tuple[Section, str]:
    """Give the innermost section on the way to a key, and the name of its field there."""
    section: Section = config
    name = str(at[0])
    held: Any = config
    for part in at:
        if isinstance(held, Section):
            section, name = held, str(part)
            held = getattr(held, name)
        elif isinstance(held, dict | list):
            held = held[part]  # type: ignore[index] # a key path that was validated
    return section, name
