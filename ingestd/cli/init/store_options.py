"""Examples of `[lake.storage_options]` for each store, as comments and without secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ANYWHERE = "A folder, or s3://bucket/prefix, gs://, abfss://: docs/object-stores.md"
_OPTIONS: Mapping[str, Sequence[str]] = {
    "s3": (
        'AWS_REGION = "eu-central-1"',
        'AWS_ACCESS_KEY_ID = "env:AWS_ACCESS_KEY_ID"         # or file:PATH, for secrets',
        'AWS_SECRET_ACCESS_KEY = "env:AWS_SECRET_ACCESS_KEY"',
        'AWS_ENDPOINT_URL = "https://minio.example:9000"     # for stores other than Amazon\'s',
    ),
    "gs": ('GOOGLE_SERVICE_ACCOUNT = "/etc/ingestd/service-account.json"',),
    "abfss": (
        'AZURE_STORAGE_ACCOUNT_NAME = "account"',
        'AZURE_STORAGE_ACCOUNT_KEY = "env:AZURE_STORAGE_ACCOUNT_KEY"   # or file:PATH',
    ),
}
_LIKE = {"s3a": "s3", "az": "abfss", "abfs": "abfss", "adl": "abfss"}


def store_options(lake: str) -> Iterator[str]:
    """Yield the lines that follow `lake.uri` in a config."""
    scheme = urlsplit(lake).scheme if "://" in lake else ""
    options = _OPTIONS.get(_LIKE.get(scheme, scheme))
    if options is None:
        yield f"# {_ANYWHERE}"
        return
    yield ""
    yield "[lake.storage_options]"
    yield "# Passed to deltalake: docs/object-stores.md. Options that are not set are read from the"
    yield "# environment or from the machine's identity (instance profile, workload identity)."
    yield from (f"# {option}" for option in options)
