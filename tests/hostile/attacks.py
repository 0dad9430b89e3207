"""Frames and requests of a hostile client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 64 * 1024
MASK = bytes(4)
SLEEP = {"command": ["sleep", "100000"]}


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
