"""Unity Catalog's REST API, by its own client library.

Its API can't change a table, so columns and comments stay as they were when the table was named.
Readers take the schema that counts from the Delta log.

Source: Unity Catalog's OpenAPI document, `/tables` and `/schemas`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, TypeVar

import aiohttp

from ingestd.catalogs.http_session import new_session
from ingestd.catalogs.libraries import optional_client
from ingestd.config import CatalogSettings
from ingestd.model.catalog_table import CatalogColumn, CatalogTable
from ingestd.model.errors import IngestdError, OperatorError, TransientError

T = TypeVar("T")
_ABSENT, _CONFLICT, _TOO_MANY, _FIRST_OF_SERVER = 404, 409, 429, 500


class UnitySchema:
    """See `ingestd.catalogs.names.CatalogSession`."""

    def __init__(self, settings: CatalogSettings, schema: str) -> None:
        """Build the client; connects when it is used. Raises OperatorError without the library."""
        self._api = optional_client("unitycatalog.client", "unitycatalog-client", "unity")
        self._catalog, self._own = settings.catalog or "", schema
        self._timeout = settings.timeout
        self._uri = (settings.uri or "").rstrip("/")
        self._token = settings.token.get_secret_value() if settings.token else None
        self._runner = asyncio.Runner()
        self._client: Any = None

    @property
    def schema(self) -> str:
        """Catalog and schema."""
        return f"{self._catalog}.{self._own}"

    def ensure_schema(self) -> None:
        """Create it in its catalog, which must exist."""
        found = self._answer_of(lambda: self._schemas().get_schema(self.schema, **self._limit))
        if found is None:
            new = self._api.CreateSchema(name=self._own, catalog_name=self._catalog)
            self._answer_of(
                lambda: self._schemas().create_schema(new, **self._limit),
                absent=f"the catalog {self._catalog} does not exist",
            )

    def location_of(self, name: str) -> str | None:
        """Return the storage location."""
        found = self._answer_of(lambda: self._tables().get_table(self._full(name), **self._limit))
        return None if found is None else str(found.storage_location or "")

    def create_table(self, table: CatalogTable) -> None:
        """Create it as an external table."""
        new = self._api.CreateTable(
            name=table.name,
            catalog_name=self._catalog,
            schema_name=self._own,
            table_type="EXTERNAL",
            data_source_format="DELTA",
            columns=[self._column(n, each) for n, each in enumerate(table.columns)],
            storage_location=table.location,
            comment=table.comment,
            properties=dict(table.properties),
        )
        self._answer_of(
            lambda: self._tables().create_table(new, **self._limit),
            absent=f"the schema {self.schema} does not exist",
        )

    def update_table(self, table: CatalogTable) -> bool:
        """Return False: the API has no such call."""
        del table
        return False

    def drop_table(self, name: str) -> None:
        """Delete it; of an external table the files stay."""
        self._answer_of(lambda: self._tables().delete_table(self._full(name), **self._limit))

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()

    @property
    def _limit(self) -> dict[str, float]:
        return {"_request_timeout": self._timeout}

    def _full(self, name: str) -> str:
        return f"{self.schema}.{name}"

    def _schemas(self) -> Any:  # noqa: ANN401 - the library is optional
        return self._api.SchemasApi(self._client)

    def _tables(self) -> Any:  # noqa: ANN401
        return self._api.TablesApi(self._client)

    async def _connect(self) -> None:
        """Build the client in the loop, which its connections belong to."""
        if self._client is not None:
            return
        self._client = self._api.ApiClient(self._api.Configuration(host=self._uri))
        if self._token is not None:
            self._client.default_headers["Authorization"] = f"Bearer {self._token}"
        transport = self._client.rest_client
        await transport.pool_manager.close()
        transport.pool_manager = new_session(self._uri)

    def _column(self, position: int, column: CatalogColumn) -> Any:  # noqa: ANN401
        text = column.sql_type
        base = text.partition("<")[0].partition("(")[0]
        extra: dict[str, Any] = {}
        if base == "decimal":
            precision, _, scale = text[len("decimal(") : -1].partition(",")
            extra = {"type_precision": int(precision), "type_scale": int(scale)}
        field = {"name": column.name, "type": column.kind, "nullable": True, "metadata": {}}
        names = {"tinyint": "BYTE", "smallint": "SHORT", "int": "INT", "bigint": "LONG"}
        return self._api.ColumnInfo(
            name=column.name,
            type_text=text,
            type_json=json.dumps(field, ensure_ascii=False),
            type_name=names.get(base, base.upper()),
            position=position,
            comment=column.comment,
            nullable=True,
            **extra,
        )

    def _answer_of(self, call: Any, *, absent: str | None = None) -> Any:  # noqa: ANN401
        """Return the answer; None for 404, unless `absent` says what that means, and for 409."""

        async def answer() -> Any:  # noqa: ANN401
            await self._connect()
            found: Awaitable[Any] = call()
            return await found

        try:
            return self._runner.run(answer())
        except self._api.ApiException as error:
            if error.status == _CONFLICT or (error.status == _ABSENT and absent is None):
                return None
            raise self._meaning(error, absent) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransientError(
                f"Unity Catalog at {self._uri}: {type(error).__name__}",
                reason="catalog",
                remedy="check that the server runs, and [catalog] uri",
            ) from error
        except (ValueError, RecursionError) as error:  # their texts quote the answer
            raise OperatorError(
                f"Unity Catalog at {self._uri}: an answer that is none of its API's:"
                f" {type(error).__name__}",
                remedy="check [catalog] uri, which ends with /api/2.1/unity-catalog",
            ) from error

    def _meaning(self, error: Any, absent: str | None) -> IngestdError:  # noqa: ANN401
        status = int(error.status or 0)
        what = f"Unity Catalog at {self._uri}, {self.schema}: HTTP {status}"
        if status == _TOO_MANY or status >= _FIRST_OF_SERVER:
            return TransientError(what, reason="catalog")
        if status == _ABSENT and absent is not None:
            return OperatorError(
                f"Unity Catalog at {self._uri}: {absent}",
                remedy=f"create the catalog {self._catalog} there, or set [catalog] catalog; uri"
                " ends with /api/2.1/unity-catalog",
            )
        return OperatorError(
            f"{what}: {_message(error.body)}",
            remedy="check [catalog] token; its user needs privileges: to use the catalog and to"
            " create schemas and tables in it; on Databricks also external tables at the location",
        )


def _message(body: str | None) -> str:
    try:
        found = json.loads(body or "{}")
    except ValueError:
        found = {}
    text = found.get("message") if isinstance(found, dict) else None
    return str(text or "no text")[:300]
