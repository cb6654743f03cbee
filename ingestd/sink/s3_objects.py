"""New objects in an S3 store, by one request each (obstore).

deltalake's own file system sends every object in parts, three requests at least, and cannot refuse
to overwrite one; its commits can, but list and read the log around that. obstore is made of the
same object_store as deltalake and takes the same options, but for what deltalake adds to them: the
AWS SDK's chain of credentials (profiles, roles) and options of its own. So it is used where the
keys are given and nothing is said that it does not know: then both reach the same store alike.

Source: AWS documentation, "Conditional requests"; object_store's PutMode::Create.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

if TYPE_CHECKING:
    from obstore import WritableFile

PART_BYTES = 5 << 20
"""Larger objects are sent in parts of this size, the least that S3 takes."""
PARTS_AT_ONCE = 4
_KEYS = frozenset({"access_key_id", "secret_access_key"})
_REGIONS = frozenset({"region", "default_region"})
_ALLOW_HTTP = "allow_http"
_KNOWN = frozenset(
    {
        *_KEYS,
        *_REGIONS,
        _ALLOW_HTTP,
        *("session_token", "token", "endpoint_url", "endpoint", "virtual_hosted_style_request"),
        *("server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"),
    }
)
"""Options by which both reach the same store, without the `AWS_` that may be before them."""
_ELSEWHERE = re.compile(r"AWS_(?:.*ROLE_ARN|S3_LOCKING_PROVIDER|ENDPOINT_URL_\w+)")
"""Variables by which deltalake may reach another store than obstore, or by other rights."""
_YES = frozenset({"1", "true", "on", "yes", "y"})
_PLAIN_PREFIX = re.compile(r"[\w.\-/]*", re.ASCII)
_DETAILS = "\n\nDebug source:"
"""What of an error's text is for obstore's own developers."""


def s3_objects(
    uri: str, options: Mapping[str, str], environment: Mapping[str, str]
) -> S3Objects | None:
    """Give what puts objects below `uri`; None if it may reach another store than deltalake."""
    parts = urlsplit(uri)
    prefix = parts.path.strip("/")
    if parts.scheme not in {"s3", "s3a"} or not _PLAIN_PREFIX.fullmatch(prefix):
        return None
    if any(map(_ELSEWHERE.fullmatch, environment)):
        return None
    given = {_short(key): value for key, value in options.items()}
    is_plain = given.pop("conditional_put", "etag").lower() == "etag" and given.keys() <= _KNOWN
    named = {_short(key): value for key, value in environment.items() if key.startswith("AWS_")}
    config = {key: value for key, value in (named | given).items() if key in _KNOWN}
    if not (is_plain and config.keys() >= _KEYS and config.keys() & _REGIONS):
        return None
    allow_http = config.pop(_ALLOW_HTTP, "false").lower() in _YES
    try:
        store = S3Store(
            parts.netloc,
            prefix=prefix or None,
            config={f"aws_{key}": value for key, value in config.items()},  # type: ignore[arg-type]
            client_options={"allow_http": allow_http},
        )
    except (BaseError, ValueError):
        return None  # deltalake says what is wrong
    return S3Objects(store)


def _short(option: str) -> str:
    return option.lower().removeprefix("aws_")


class S3Objects:
    """Puts objects. All calls block, and let other threads run. Raises OSError."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def put_new(self, path: str, content: bytes) -> bool:
        """Put an object, or give False if there is one: it is ours if an answer was lost."""
        try:
            with _as_os_error():
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def create(self, path: str) -> IO[bytes]:
        """Open a new object for writing; it appears when closed."""
        with _as_os_error():
            opened = obstore.open_writer(
                self._store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
        return io.BufferedWriter(_Upload(opened), 1 << 20)


class _Upload(io.RawIOBase):
    """Counts what was written, which Parquet writers ask for."""

    def __init__(self, opened: WritableFile) -> None:
        self._opened = opened
        self._position = 0

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        with _as_os_error():
            self._opened.write(data)
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with _as_os_error():
                self._opened.close()


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(_told(error)) from error
    except (BaseError, OSError) as error:  # FileNotFoundError where there is no bucket
        raise OSError(_told(error)) from error


def _told(error: Exception) -> str:
    return str(error).partition(_DETAILS)[0]
