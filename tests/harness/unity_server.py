"""A stand-in for Unity Catalog's server: schemas and tables of its OpenAPI document, in memory.

The server itself can't be installed here: no registry that the tests use has its jar.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = "/api/2.1/unity-catalog"
_REQUIRED = {
    "name",
    "catalog_name",
    "schema_name",
    "table_type",
    "data_source_format",
    "columns",
    "storage_location",
}
"""Of a table to create, by the OpenAPI document."""


class UnityServer:
    """Serves one catalog, `main`, on loopback while it is open. `token`: that it asks for.

    `refusals`: status codes of the next answers, instead of doing anything.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.schemas: set[str] = set()
        self.tables: dict[str, dict[str, Any]] = {}
        self.refusals: list[int] = []
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}{ROOT}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append((method, path))
        if self.refusals:
            return self.refusals.pop(0), {"error_code": "REFUSED", "message": "it refuses"}
        kind, _, name = path.removeprefix(ROOT).strip("/").partition("/")
        made: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {
            "schemas": self._create_schema,
            "tables": self._create_table,
        }
        if method == "POST":
            return made[kind](body)
        if kind == "schemas":
            return (200, {"full_name": name}) if name in self.schemas else _missing(name)
        if name not in self.tables:
            return _missing(name)
        return 200, self.tables.pop(name) if method == "DELETE" else self.tables[name]

    def _create_schema(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["catalog_name"] != "main":
            return _missing(body["catalog_name"])
        self.schemas.add(f"main.{body['name']}")
        return 200, body

    def _create_table(self, body: dict[str, Any]) -> tuple[int, Any]:
        schema = f"{body['catalog_name']}.{body['schema_name']}"
        if schema not in self.schemas:
            return _missing(schema)
        assert body.keys() >= _REQUIRED
        assert all(
            {"name", "type_text", "type_json", "type_name", "position"} <= c.keys()
            for c in body["columns"]
        )
        if f"{schema}.{body['name']}" in self.tables:
            return 409, {"error_code": "ALREADY_EXISTS", "message": "exists"}
        self.tables[f"{schema}.{body['name']}"] = body
        return 200, body

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                wanted = None if server.token is None else f"Bearer {server.token}"
                if wanted is not None and self.headers.get("Authorization") != wanted:
                    code, found = 401, {"error_code": "UNAUTHENTICATED", "message": "no token"}
                else:
                    code, found = server.answer(self.command, self.path, body)
                text = json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - http.server's names

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _missing(name: str) -> tuple[int, Any]:
    return 404, {"error_code": "NOT_FOUND", "message": f"{name} not found"}
