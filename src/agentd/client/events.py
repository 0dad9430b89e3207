"""Server-sent events, as a client reads them line by line."""

from __future__ import annotations

from typing import Any, NamedTuple

from agentd.client.errors import parse_content

_FIELDS = ("event", "data", "id")


class NodeEvent(NamedTuple):
    """An event: its kind, the answer of the matching call, and the id to resume after."""

    kind: str
    data: dict[str, Any]
    id: str


class EventParser:
    """A parser of a stream's lines.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._members: dict[str, str] = {}

    def parse_line(self, line: bytes | bytearray) -> NodeEvent | None:
        """Parse a line, and return the event that it completes.

        Raises:
            Refused: the event is not JSON.
        """
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
        return NodeEvent(kind, parse_content(members["data"].encode()), event_id)
