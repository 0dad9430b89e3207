"""The HTTP of the hooks: answers that break, and lists of several pages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentd.errors import AgentdError, Unavailable
from agentd_slurm.node_client import NodeClient

Serve = Callable[..., NodeClient]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a client of a server that gives these answers, the last one again and again."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()

    def answer_all(answers: list[bytes]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answers.pop(0) if answers[1:] else answers[0])

    def client(*answers: bytes) -> NodeClient:
        thread = threading.Thread(target=answer_all, args=([*answers],), daemon=True)
        thread.start()
        return NodeClient(str(tmp_path / "socket"), 0.5)

    yield client
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def ok(content: bytes, *headers: bytes) -> bytes:
    lines = (b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(content), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\n", b"x\r\n\r\n", b"HTTP/1.1 x\r\n\r\n", ok(b"[]")[:-1]],
)
def test_broken_answer_is_no_answer(serve: Serve, answer: bytes) -> None:
    with pytest.raises(Unavailable):
        serve(answer).devices()


def test_call_is_repeated_after_a_broken_answer(serve: Serve) -> None:
    assert serve(b"", b"HTTP/1.1 503 No\r\n\r\n", ok(b"[1]")).devices() == [1]


def test_pages_of_a_list_are_one(serve: Serve) -> None:
    more = b'link: </v1/kernels?after=k2>; rel="next"'
    assert serve(ok(b"[1, 2]", more), ok(b"[3]")).kernels() == [1, 2, 3]


def test_refusal_has_its_code(serve: Serve) -> None:
    body = b'{"code": "UnknownAgent", "status": 404, "detail": "unknown agent a"}'
    with pytest.raises(AgentdError, match="unknown agent a") as refusal:
        serve(b"HTTP/1.1 404 Not Found\r\n\r\n" + body).devices()
    assert refusal.value.code == "UnknownAgent"
