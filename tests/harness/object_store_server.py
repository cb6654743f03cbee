"""moto's S3 behind a layer that requests below ``/-/`` control, as a separate process.

It prints its port, and ends when its standard input ends. ``tests.harness.object_store`` starts it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
_UNKNOWN = "<Error><Code>NotImplemented</Code><Message>A header is unknown</Message></Error>"
_SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"
_CONFLICT = "<Error><Code>ConditionalRequestConflict</Code><Message>Try again</Message></Error>"
_HELD = {"hold": ("", 500), "hold_409": (_CONFLICT, 409)}
"""Answers to puts that are executed later."""
_NO_UPLOAD = "<Error><Code>NoSuchUpload</Code><Message>It does not exist.</Message></Error>"
_ANSWERS = {
    "forget": (_NO_UPLOAD, 404),
    "refuse": (_SLOW_DOWN, 503),
    "expire": (_EXPIRED, 403),
    "break": ("", 500),
    "unknown": (_UNKNOWN, 501),
}
"""Answers without any effect, by kind of fault."""
_OF_CONDITIONS = ("overwrite", "unknown", "hold", "hold_409")
"""Faults of conditional puts (If-None-Match), which must fail if the object exists."""


class Layer:
    """Records and delays each request, and fails those for which a fault is pending."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._requests: list[tuple[str, str]] = []
        self._latency_s = 0.0
        self._faults: list[dict[str, Any]] = []
        self._came = 0
        self._held: list[WSGIEnvironment] = []

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], parse_qs(environ["QUERY_STRING"])
        if path.startswith("/-/"):
            return self._steer(path.removeprefix("/-/"), query)(environ, start)
        method = "LIST" if "list-type" in query else environ["REQUEST_METHOD"]
        with self._lock:
            self._requests.append((method, path))
            is_new = "HTTP_IF_NONE_MATCH" in environ
            latency_s, fault = self._latency_s, self._fault_of(method, path, is_new=is_new)
        time.sleep(latency_s)
        if fault in _ANSWERS:
            return Response(*_ANSWERS[fault])(environ, start)
        if fault == "overwrite":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault in _HELD:
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self._held.append({**environ, "wsgi.input": io.BytesIO(body)})
            return Response(*_HELD[fault])(environ, start)
        if fault == "lose":
            done = Response.from_app(self._app, environ)
            assert done.status_code < 300, done.status
            return Response("", 500)(environ, start)
        return self._app(environ, start)

    def _fault_of(self, method: str, path: str, *, is_new: bool) -> str | None:
        for fault in self._faults:
            if fault["kind"] in _OF_CONDITIONS and not is_new:
                continue
            if fault["times"] and fault["method"] == method and fault["path"] in path:
                fault["times"] -= 1
                self._came += 1
                return str(fault["kind"])
        return None

    def _steer(self, what: str, query: dict[str, list[str]]) -> Response:
        with self._lock:
            if what == "latency":
                self._latency_s = float(query["s"][0])
            elif what == "fault":
                kind, method, path, times = (
                    query[k][0] for k in ("kind", "method", "path", "times")
                )
                found = {"kind": kind, "method": method, "path": path, "times": int(times)}
                self._faults.append(found)
            elif what == "recover":
                came, self._came, self._faults = self._came, 0, []
                return Response(json.dumps([[came]]))
            elif what == "late":
                held, self._held = self._held, []
                answers = [Response.from_app(self._app, environ) for environ in held]
                return Response(json.dumps([[answer.status_code] for answer in answers]))
            elif what == "faults":  # pending ones
                return Response(json.dumps([f for f in self._faults if f["times"]]))
            requests, self._requests = self._requests, []
        return Response(json.dumps(requests))


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - the base's name
        del type, message, args


def main() -> None:
    app = Layer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    print(server.port, flush=True)  # noqa: T201 - for the parent process
    server.serve_forever()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
