"""Attacks of one client, in a process of its own until it is killed.

    python tests/hostile/attacks.py NAME ADDRESS [--connections 8] [--token TOKEN]

ADDRESS is the path of a unix socket or HOST:PORT. Commands run in the kernel `k1`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 64 * 1024
BEGUN = 4000
"""Bytes after which an attack has begun."""
MASK = bytes(4)
SLEEP = {"command": ["sleep", "100000"]}
TAKE = {"command": ["sh", "-c", "cat >/dev/null"]}


def frame(opcode: int, payload: bytes = b"", *, is_final: bool = True) -> bytes:
    """Return a masked frame (RFC 6455) of less than 126 bytes."""
    return bytes([opcode | (0x80 if is_final else 0), 0x80 | len(payload)]) + MASK + payload


def text(order: object) -> bytes:
    return frame(1, json.dumps(order).encode())


def filled(piece: bytes) -> bytes:
    return piece * (BLOCK // len(piece))


FRAMES = {
    "resize": text({"resize": [80, 25]}),
    "signal": text({"signal": "CONT"}),
    "stdin-closed": text({"stdin": "closed"}),
    "ping": frame(9),
    "pong": frame(10),
    "empty": frame(2),
}
"""Control frames; a client that sends them without an end is cut off."""
DATA = {"byte": frame(2, b"x")}


class Client(NamedTuple):
    """The beginning of a client's requests."""

    token: str
    kernel: str = "k1"

    def request(self, method: str, path: str, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        return "\r\n".join([*lines, "", ""]).encode()

    def socket(self, asked: object, endless: bytes, first: bytes = b"") -> Iterator[bytes]:
        """Begin a command, and go on with the same frame for ever."""
        upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
        path = f"/v1/kernels/{self.kernel}/exec"
        yield self.request("GET", path, *upgrade, key) + text(asked) + first
        yield b""  # the answer
        yield from itertools.repeat(filled(endless))

    def requests(self, path: str) -> Iterator[bytes]:
        return itertools.repeat(filled(self.request("GET", path)))

    def chunks(self) -> Iterator[bytes]:
        """Send bodies in chunks of one byte."""
        head = self.request("POST", "/v1/agents/agent-1/kernels", "Transfer-Encoding: chunked")
        while True:
            yield head
            for _ in range(2):
                yield filled(b"1\r\n \r\n")
            yield b"0\r\n\r\n"

    def header(self) -> Iterator[bytes]:
        """Send headers byte by byte."""
        while True:
            for byte in self.request("GET", "/livez", f"X: {'x' * 4000}"):
                yield bytes([byte])


ATTACKS: dict[str, Callable[[Client], Iterator[bytes]]] = {
    **{name: lambda client, sent=sent: client.socket(SLEEP, sent) for name, sent in FRAMES.items()},
    **{name: lambda client, sent=sent: client.socket(TAKE, sent) for name, sent in DATA.items()},
    "fragments": lambda client: client.socket(
        TAKE, frame(0, is_final=False), first=frame(2, is_final=False)
    ),
    "lists": lambda client: client.requests("/v1/kernels"),
    "probes": lambda client: client.requests("/livez"),
    "chunks": lambda client: client.chunks(),
    "header": lambda client: client.header(),
    "newcomers": lambda client: iter([client.request("GET", "/livez", "Connection: close")]),
    "events": lambda client: iter([client.request("GET", "/v1/events")]),
    "unread-events": lambda client: iter([client.request("GET", "/v1/events")]),
}


class Connection:
    """One connection of the client; reconnects when the server closes it."""

    def __init__(self, address: str, attack: Callable[[], Iterator[bytes]], name: str) -> None:
        self._pieces = attack()
        self._left = b""
        self.sent = 0
        self._reads = name != "unread-events"
        self._may_send, self._is_answered = True, False
        if address.startswith("/"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(address)
        else:
            host, _, port = address.rpartition(":")
            self.sock = socket.create_connection((host, int(port)))
        self.sock.setblocking(False)

    @property
    def events(self) -> int:
        wanted = selectors.EVENT_READ if self._reads else 0
        return wanted | (selectors.EVENT_WRITE if self._may_send else 0)

    def turn(self, events: int) -> bool:
        """Read and write what is possible; return whether the server goes on."""
        try:
            if events & selectors.EVENT_READ and self._reads:
                if not self.sock.recv(BLOCK):
                    return False
                self._is_answered = self._may_send = True
            if events & selectors.EVENT_WRITE and self._may_send:
                self._send()
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _send(self) -> None:
        if not self._left:
            self._left = next(self._pieces, b"")
            self._may_send = bool(self._left) or self._is_answered
            self._is_answered = False
        if self._left:
            sent = self.sock.send(self._left)
            self._left = self._left[sent:]
            self.sent += sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("address")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--token", default="")
    parser.add_argument("--uid", type=int, default=os.getuid())
    asked = parser.parse_args()
    os.setuid(asked.uid)
    client = Client(asked.token)
    selector = selectors.DefaultSelector()
    silent: list[Connection] = []

    def open_one() -> None:
        made = Connection(asked.address, lambda: ATTACKS[asked.name](client), asked.name)
        selector.register(made.sock, made.events, made)

    for _ in range(asked.connections):
        open_one()
    sent = 0
    while True:
        for key, events in selector.select():
            connection: Connection = key.data
            before = connection.sent
            goes_on = connection.turn(events)
            has_begun = sent >= BEGUN
            sent += connection.sent - before
            if not has_begun and (sent >= BEGUN or "events" in asked.name):
                sent = max(sent, BEGUN)
                print("attacking", flush=True)
            if goes_on and connection.events:
                selector.modify(connection.sock, connection.events, connection)
                continue
            selector.unregister(connection.sock)
            if goes_on:
                silent.append(connection)
            else:
                connection.sock.close()
                open_one()


if __name__ == "__main__":
    sys.exit(main())
