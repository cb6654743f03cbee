"""A client that creates objects in an S3 store with one request each (obstore).

deltalake's own file system sends every object in parts, at least three requests, and can't refuse
to overwrite one. Its commits can refuse that, but list and read the log as well. obstore is based
on the same object_store as deltalake, but is configured differently: deltalake asks the AWS SDK for
credentials (profiles, roles), and reads options from variables in any spelling. So obstore is used
only if no setting could make the two reach different stores, or use different credentials;
otherwise `s3_objects` gives the reason.

Source: AWS documentation, "Conditional requests"; object_store's `PutMode::Create`,
`AmazonS3ConfigKey` and `ClientConfigKey`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from ingestd.config.units import seconds

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ClientConfig, RetryConfig

PART_BYTES = 5 << 20
"""Larger objects are sent in parts of this size, the smallest that S3 accepts."""
PARTS_AT_ONCE = 2
"""Parts of an object that are in memory until they are sent."""
_NEEDED = ("access_key_id", "secret_access_key", "region")
_ALIASES = {"default_region": "region", "endpoint": "endpoint_url", "token": "session_token"}
_CONFIG = frozenset(
    {
        *_NEEDED,
        *("session_token", "endpoint_url", "virtual_hosted_style_request", "conditional_put"),
        *("server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"),
    }
)
_HOW = frozenset({"allow_http", "timeout", "connect_timeout", "max_retries", "retry_timeout"})
"""Further options that obstore gets; both sets without the optional prefix `AWS_`."""
_VARIABLES = _CONFIG | {"allow_http"}
_DELTALAKE_OPTION = re.compile(
    r"bucket(_name)?|endpoint_url_(s3|sts)|metadata_endpoint|imdsv1_fallback|unsigned_payload"
    r"|checksum_algorithm|container_(credentials_\w+_uri|authorization_token_file)|role_arn"
    r"|web_identity_token_file|role_session_name|skip_signature|copy_if_not_exists"
    r"|disable_tagging|request_payer|s3_express|sse_customer_key_base64|allow_invalid_certificates"
    r"|(connect_|read_|pool_idle_)?timeout|default_content_type|http1_only|http2_\w+"
    r"|pool_max_idle_per_host|proxy_(url|ca_certificate|excludes)|randomize_addresses|user_agent"
)
"""Names, in any case and without `AWS_`, of variables that deltalake may read as options."""
_OF_OTHER_PROGRAMS = frozenset(
    {
        *("profile", "default_profile", "config_file", "shared_credentials_file"),
        *("execution_env", "pager", "default_output", "sdk_load_config", "ec2_metadata_disabled"),
        *("retry_mode", "max_attempts", "sts_regional_endpoints", "ca_bundle"),
    }
)
"""Variables (`AWS_...`) that have no effect if the keys and the region are set."""
_YES = frozenset({"1", "true", "on", "yes", "y"})
_BUCKET = re.compile(r"[a-z0-9.-]+")
_PATH = re.compile(r"(?:/[\w-][\w.-]*)*/?", re.ASCII)
_ENDPOINT = re.compile(r"https?://[\w.:\[\]-]+(?:/[\w./-]*)?", re.ASCII)
_VALUE = re.compile(r"[ -~]+")
_NO_UPLOAD = "NoSuchUpload"
_LISTED = 1000
"""Objects that S3 lists per request."""
_DETAILS = "\n\nDebug source:"
"""Beginning of the part of an error's text that is meant for obstore's developers."""


class NotSureError(Exception):
    """Deltalake might reach another store. The text says why."""


def s3_objects(uri: str, options: Mapping[str, str], environment: Mapping[str, str]) -> S3Objects:
    """Return a client that puts objects below `uri`. Raise NotSureError."""
    parts = urlsplit(uri)
    if parts.scheme not in {"s3", "s3a"}:
        raise NotSureError(f"{parts.scheme}:// is not S3")
    is_plain = parts.geturl() == f"{parts.scheme}://{parts.netloc}{parts.path}"
    if not (is_plain and _BUCKET.fullmatch(parts.netloc) and _PATH.fullmatch(parts.path)):
        raise NotSureError("the URI has unusual characters")
    given = _options(options)
    config = _variables(environment, given, {_short(option) for option in options}) | given
    for name in _NEEDED:
        if name not in config:
            raise NotSureError(f"AWS_{name.upper()} is not set")
    if "endpoint_url" in config and not _ENDPOINT.fullmatch(config["endpoint_url"]):
        raise NotSureError("AWS_ENDPOINT_URL is not a plain URL")
    if config.get("conditional_put", "etag").lower() != "etag":
        raise NotSureError("AWS_CONDITIONAL_PUT is not etag")
    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config={f"aws_{key}": config[key] for key in config.keys() & _CONFIG},  # type: ignore[arg-type]
            client_options=_client(config),
            retry_config=_retry(config),
        )
    except (BaseError, ValueError) as error:
        raise NotSureError(f"an option can't be read: {_text_of(error)}") from error
    return S3Objects(store)


def _client(config: Mapping[str, str]) -> ClientConfig:
    """Return the connection settings among the options. Raise ValueError."""
    found: ClientConfig = {"allow_http": config.get("allow_http", "").lower() in _YES}
    if "timeout" in config:
        found["timeout"] = _time(config["timeout"])
    if "connect_timeout" in config:
        found["connect_timeout"] = _time(config["connect_timeout"])
    return found


def _retry(config: Mapping[str, str]) -> RetryConfig:
    """Return the retry settings among the options. Raise ValueError."""
    found: RetryConfig = {}
    if "retry_timeout" in config:
        found["retry_timeout"] = _time(config["retry_timeout"])
    if "max_retries" in config:
        found["max_retries"] = int(config["max_retries"])
    return found


def _time(text: str) -> timedelta:
    return timedelta(seconds=seconds(text))


def _options(options: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for option, value in options.items():
        name = _name(option)
        if name not in _CONFIG | _HOW:
            raise NotSureError(f"obstore does not support the option {option}")
        _add(found, name, option, value)
    return found


def _variables(
    environment: Mapping[str, str], given: Mapping[str, str], configured: set[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable, value in environment.items():
        name = _name(variable)
        is_plain = variable.startswith("AWS_") and variable.isupper()
        if is_plain and name in _VARIABLES:
            if _short(variable) in configured:
                continue  # an option of the same name takes precedence
            _add(found, name, variable, value)
            if given.get(name, value) != value:
                raise NotSureError(f"the variable {variable} contradicts an option")
        elif is_plain and name in _OF_OTHER_PROGRAMS:
            continue
        elif is_plain or name in _VARIABLES or _DELTALAKE_OPTION.fullmatch(name):
            raise NotSureError(f"the variable {variable} is set")
    return found


def _add(found: dict[str, str], name: str, written_as: str, value: str) -> None:
    if not _VALUE.fullmatch(value):  # obstore panics on some
        raise NotSureError(f"{written_as} is empty, or has unusual characters")
    if found.setdefault(name, value) != value:
        raise NotSureError(f"{written_as} is set twice, by different names")


def _short(option: str) -> str:
    return option.lower().removeprefix("aws_")


def _name(option: str) -> str:
    return _ALIASES.get(_short(option), _short(option))


class S3Objects:
    """Puts and reads objects. All calls block, but let other threads run. Raises OSError."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Put an object; return False if one exists, perhaps from a put whose answer was lost."""
        try:
            with _as_os_error():
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def open(self, path: str) -> S3Object:
        """Begin to write a new object."""
        with _as_os_error():
            opened = obstore.open_writer(
                self._store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
        return S3Object(opened, partial(self.size, path))

    def read(self, path: str, ensure: Callable[[int], None]) -> bytes:
        """Read an object, unless `ensure` raises for its size. Raise FileNotFoundError."""
        try:
            with _as_os_error(keeps_missing=True):
                found = obstore.get(self._store, path)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        ensure(found.meta["size"])
        with _as_os_error():
            return bytes(found.bytes())

    def sizes(self, path: str, above: str) -> list[tuple[str, int]]:
        """Return path and size of the objects below a prefix whose names sort above `above`."""
        offset = f"{path}/{above}" if above else None
        with _as_os_error():
            pages = obstore.list(self._store, path, offset=offset, chunk_size=_LISTED)
            return [(found["path"], found["size"]) for page in pages for found in page]

    def size(self, path: str) -> int | None:
        """Return the size of an object, None if it does not exist."""
        with _as_os_error(), suppress(FileNotFoundError):
            return obstore.head(self._store, path)["size"]
        return None


class S3Object:
    """An object being written, which appears when it is closed. Raises OSError."""

    def __init__(self, opened: WritableFile, size: Callable[[], int | None]) -> None:
        self._opened = opened
        self._size = size
        self._nbytes = 0

    def write(self, data: bytes) -> None:
        """Append to the object. obstore keeps `data` without a copy, so it must not change."""
        with _as_os_error():
            self._opened.write(data)
        self._nbytes += len(data)

    def close(self) -> None:
        """Send the rest.

        If the answer to the last request is lost, the request is repeated. By then S3 has completed
        the upload and may no longer know it.
        """
        try:
            with _as_os_error():
                self._opened.close()
        except OSError as error:
            if _NO_UPLOAD not in str(error) or self._size() != self._nbytes:
                raise


@contextmanager
def _as_os_error(*, keeps_missing: bool = False) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(_text_of(error)) from error
    except FileNotFoundError as error:
        if keeps_missing:
            raise
        raise OSError(_text_of(error)) from error
    except (BaseError, OSError) as error:  # also FileNotFoundError for a missing bucket
        raise OSError(_text_of(error)) from error


def _text_of(error: Exception) -> str:
    return str(error).partition(_DETAILS)[0]
