"""Fetching completions from a gateway in another process, when its connections do not hold."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from art_core.errors import CaptureError
from art_core.inference.gateway_client import GatewayClient
from art_core.inference.gateway_log import Completion


@contextmanager
def server(*answers: bytes) -> Generator[str]:
    """A server that gives each connection the next answer and closes it; an empty one is no answer at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(60)
        assert not thread.is_alive()


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)


def completion() -> Completion:
    return Completion(
        key="k",
        path="/chat/completions",
        request=b'{"model": "m@0", "messages": []}',
        response=b'{"choices": []}',
        model="m@0",
        policy=None,
        status=200,
        started_at=1.0,
        first_byte=0.1,
        duration=0.2,
    )


def test_a_connection_that_is_closed_without_an_answer_is_tried_once_more() -> None:
    with server(b"", http(completion().to_json())) as url:
        client = GatewayClient(url)
        assert client.take("k").result(60) == completion()
        client.close()


def test_a_gateway_that_never_answers_is_named() -> None:
    with server(b"", b"") as url:
        client = GatewayClient(url)
        with pytest.raises(CaptureError, match=f"{url} did not answer"):
            client.take("k").result(60)
        client.close()
