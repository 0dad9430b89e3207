"""Attacks of one client, in a process of its own until it is killed.

    python benchmarks/attack.py NAME ADDRESS [--connections 8] [--token TOKEN]

ADDRESS is the path of a unix socket or HOST:PORT. Commands run in the kernel `k1`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hostile"))
from attacks import BLOCK, FRAMES, SLEEP, Client, filled, frame

BEGUN = 4000
"""Bytes after which an attack has begun."""
TAKE = {"command": ["sh", "-c", "cat >/dev/null"]}
DATA = {"byte": frame(2, b"x")}


def requests(client: Client, path: str) -> Iterator[bytes]:
    return itertools.repeat(filled(client.request("GET", path)))


def chunks(client: Client) -> Iterator[bytes]:
    """Send bodies in chunks of one byte."""
    head = client.request("POST", "/v1/agents/agent-1/kernels", "Transfer-Encoding: chunked")
    while True:
        yield head
        for _ in range(2):
            yield filled(b"1\r\n \r\n")
        yield b"0\r\n\r\n"


def header(client: Client) -> Iterator[bytes]:
    """Send headers byte by byte."""
    while True:
        for byte in client.request("GET", "/livez", f"X: {'x' * 4000}"):
            yield bytes([byte])


ATTACKS: dict[str, Callable[[Client], Iterator[bytes]]] = {
    **{name: lambda client, sent=sent: client.socket(SLEEP, sent) for name, sent in FRAMES.items()},
    **{name: lambda client, sent=sent: client.socket(TAKE, sent) for name, sent in DATA.items()},
    "fragments": lambda client: client.socket(
        TAKE, frame(0, is_final=False), first=frame(2, is_final=False)
    ),
    "lists": lambda client: requests(client, "/v1/kernels"),
    "probes": lambda client: requests(client, "/livez"),
    "chunks": chunks,
    "header": header,
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
