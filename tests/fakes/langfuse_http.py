"""The HTTP side of a fake Langfuse: routes, keys, and faults done to connections."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from fakes.langfuse_server import LangfuseServer

PUBLIC_KEY, SECRET_KEY = "pk-test", "sk-test"


@dataclass(slots=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    at: float


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away is what some tests are about


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: LangfuseServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(lambda: self._read())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._serve(lambda: self._written(body))

    def _serve(self, answer: Callable[[], None]) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.where, self.query = parts.path, query
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.fake.asked.append(Asked(self.command, parts.path, query, headers, time.monotonic()))
        fault = self.fake.fault(parts.path)
        self.quiet = fault is not None
        if fault is not None:
            if fault.applied:
                answer()
            time.sleep(fault.delay)
            if fault.until is not None:
                fault.until.wait(120)
            self.quiet = False
            if fault.status == 0:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            elif fault.status == 200:
                answer()
            else:
                more = {} if fault.retry_after is None else {"retry-after": fault.retry_after}
                self._json(fault.status, {"message": "as the test wants it"}, more)
            return
        expected = "Basic " + base64.b64encode(f"{self.fake.public_key}:{SECRET_KEY}".encode()).decode()
        if headers.get("authorization") != expected:
            self._json(401, {"message": "Invalid credentials"})
            return
        answer()

    def _written(self, body: bytes) -> None:
        if len(body) > self.fake.largest:
            self._json(413, {"message": "too large"})
        elif self.where == "/api/public/otel/v1/traces":
            assert self.headers["content-type"] == "application/x-protobuf"
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            response = self.fake.take_spans(body)
            self._answer(200, response.SerializeToString(), "application/x-protobuf")
        elif self.where == "/api/public/scores":
            self._json(*self.fake.take_scores(json.loads(body)))
        else:
            self._json(404, {"message": f"no {self.where}"})

    def _read(self) -> None:
        prompts = "/api/public/v2/prompts/"
        if self.where == "/api/public/v2/observations":
            self._json(200, self.fake.list_observations(self.query))
        elif self.where == "/api/public/v3/scores":
            self._json(200, self.fake.list_scores(self.query))
        elif self.where == "/api/public/projects":
            project = {"id": "p", "name": "test", "organization": {"id": "o", "name": "o"}, "metadata": {}}
            self._json(200, {"data": [project]})
        elif self.where.startswith(prompts):
            found = self.fake.prompt(unquote(self.where.removeprefix(prompts)), self.query)
            self._json(200 if found else 404, found or {"message": "Prompt not found"})
        else:
            self._json(404, {"message": f"no {self.where}"})

    def _json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json", headers)

    def _answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        if self.quiet:
            return
        self.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
