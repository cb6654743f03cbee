"""AWS Glue's Data Catalog, by boto3.

Glue keeps columns and properties for readers such as Athena; all read the schema that counts from
the Delta log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ingestd.catalogs.http_session import uses_proxies
from ingestd.catalogs.libraries import optional_client
from ingestd.config import CatalogSettings
from ingestd.model.catalog_table import CatalogTable
from ingestd.model.errors import IngestdError, OperatorError, TransientError

_PARAMETERS = {
    "EXTERNAL": "TRUE",
    "classification": "delta",
    "spark.sql.sources.provider": "delta",
    "table_type": "DELTA",
}
"""Parameters by which Athena, Redshift Spectrum and Spark recognize a Delta table."""
_ABSENT, _EXISTS = "EntityNotFoundException", "AlreadyExistsException"
_NOT_SET = {"NoCredentialsError", "NoRegionError", "PartialCredentialsError"}
_PASSING = {
    "ConcurrentModificationException",
    "InternalServiceException",
    "InternalServiceError",
    "OperationTimeoutException",
    "RequestLimitExceeded",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
}
_MOST_TYPE = 131_072
_MOST_COMMENT = 255
"""Glue's limits of a column's type and comment."""


class GlueSchema:
    """See `ingestd.catalogs.names.CatalogSession`. Credentials are those of boto3's chain."""

    def __init__(self, settings: CatalogSettings, schema: str) -> None:
        """Build the client. Raises OperatorError without boto3."""
        self.schema = schema
        boto3 = optional_client("boto3", "boto3", "glue")
        limits = optional_client("botocore.config", "boto3", "glue").Config(
            connect_timeout=settings.timeout,
            read_timeout=settings.timeout,
            retries={"total_max_attempts": 3, "mode": "standard"},
            proxies=None if uses_proxies(settings.uri or "") else {},
        )
        with self._faults("client"):
            own = boto3.session.Session(region_name=settings.region)  # (the default one is shared)
            self._client: Any = own.client("glue", endpoint_url=settings.uri, config=limits)

    def ensure_schema(self) -> None:
        """Create the database."""
        if self._call("get_database", _ABSENT, Name=self.schema) is None:
            self._call("create_database", _EXISTS, DatabaseInput={"Name": self.schema})

    def location_of(self, name: str) -> str | None:
        """Return the location in the storage descriptor."""
        found = self._table(name)
        if found is None:
            return None
        return str(found.get("StorageDescriptor", {}).get("Location", ""))

    def create_table(self, table: CatalogTable) -> None:
        """Create it."""
        made = _input(table)
        self._call("create_table", _EXISTS, DatabaseName=self.schema, TableInput=made)

    def update_table(self, table: CatalogTable) -> bool:
        """Compare what is set here; parameters of others stay."""
        found, wanted = self._table(table.name), _input(table)
        if found is None:
            return False
        there = found.get("Parameters", {})
        columns = found.get("StorageDescriptor", {}).get("Columns", [])
        if (
            found.get("Description", "") == wanted["Description"]
            and wanted["Parameters"].items() <= there.items()
            and _plain(columns) == _plain(wanted["StorageDescriptor"]["Columns"])
        ):
            return False
        wanted["Parameters"] = {**there, **wanted["Parameters"]}
        self._call("update_table", _ABSENT, DatabaseName=self.schema, TableInput=wanted)
        return True

    def drop_table(self, name: str) -> None:
        """Delete it."""
        self._call("delete_table", _ABSENT, DatabaseName=self.schema, Name=name)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _table(self, name: str) -> dict[str, Any] | None:
        found = self._call("get_table", _ABSENT, DatabaseName=self.schema, Name=name)
        return None if found is None else found["Table"]

    def _call(self, call: str, passed: str, **arguments: Any) -> dict[str, Any] | None:  # noqa: ANN401
        """Return the answer; None for the error code `passed`."""
        with self._faults(call):
            try:
                found: dict[str, Any] = getattr(self._client, call)(**arguments)
            except self._client.exceptions.ClientError as error:
                if error.response.get("Error", {}).get("Code") != passed:
                    raise
                return None
            return found

    @contextmanager
    def _faults(self, call: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - an extra

        try:
            yield
        except ClientError as error:
            raise self._meaning(call, error.response.get("Error", {})) from error
        except BotoCoreError as error:
            kind = type(error).__name__
            what = f"AWS Glue, {call}: {kind}"
            if kind in _NOT_SET:
                remedy = "set AWS_REGION and credentials of AWS, or [catalog] region"
                raise OperatorError(what, remedy=remedy) from error
            remedy = "check the network and [catalog] uri"
            raise TransientError(what, reason="catalog", remedy=remedy) from error

    def _meaning(self, call: str, fault: dict[str, str]) -> IngestdError:
        code = fault.get("Code", "")
        what = f"AWS Glue, {call} in {self.schema}: {code}"
        if code in _PASSING:
            return TransientError(what, reason="catalog")
        return OperatorError(
            f"{what}: {fault.get('Message', '')[:300]}",
            remedy="allow glue:GetDatabase, CreateDatabase, GetTable, CreateTable, UpdateTable and"
            f" DeleteTable on database {self.schema} and its tables",
        )


def _input(table: CatalogTable) -> dict[str, Any]:
    columns = [
        {
            "Name": column.name,
            # (Hive has no timestamp without a time zone)
            "Type": column.sql_type.replace("timestamp_ntz", "timestamp")[:_MOST_TYPE],
            # (Glue refuses line breaks)
            "Comment": " ".join((column.comment or "").split())[:_MOST_COMMENT],
        }
        for column in table.columns
    ]
    return {
        "Name": table.name,
        "Description": table.comment,
        "TableType": "EXTERNAL_TABLE",
        "Parameters": {**_PARAMETERS, **table.properties},
        "StorageDescriptor": {
            "Columns": columns,
            "Location": table.location,
            "SerdeInfo": {"Parameters": {"path": table.location, "serialization.format": "1"}},
        },
    }


def _plain(columns: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(c["Name"], c.get("Type", ""), c.get("Comment", "")) for c in columns]
