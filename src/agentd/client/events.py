"""Server-sent events, as a client reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from agentd.client.errors import parse_content
from agentd.errors import Refused

_FIELDS = ("event", "data", "id", "at")


class NodeEvent(NamedTuple):
    """An event: its kind, the answer of the matching call, the id to resume after, and its time."""

    kind: str
    data: dict[str, Any]
    id: str
    at: str = ""


class EventParser:
    """A parser of one stream; a line may be as long as a kernel's command and labels.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._partial_line = bytearray()
        self._members: dict[str, str] = {}

    def parse(self, chunk: bytes) -> Iterator[NodeEvent]:
        """Yield the events that a chunk completes.

        Raises:
            Refused: a line exceeds the limit, or an event is not JSON.
        """
        self._partial_line += chunk
        if b"\n" in chunk:
            *lines, self._partial_line = self._partial_line.split(b"\n")
            for line in lines:
                if (event := self._parse_line(line)) is not None:
                    yield event
        if len(self._partial_line) > self._max_bytes:
            raise Refused("Internal", f"an event exceeds {self._max_bytes} bytes", {})

    def _parse_line(self, line: bytearray) -> NodeEvent | None:
        """Parse a line, and return the event that it completes."""
        text = line.decode(errors="replace").rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name in _FIELDS:
                self._members[name] = value.removeprefix(" ")
            return None
        members, self._members = self._members, {}
        if "data" not in members:
            return None
        kind, event_id = members.get("event", "message"), members.get("id", "")
        data = parse_content(members["data"].encode())
        return NodeEvent(kind, data, event_id, members.get("at", ""))
