"""Server-sent events, as a client reads them line by line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An event: its kind, the answer of the matching call, and the id to resume after."""

    kind: str
    data: dict[str, Any]
    id: str


class Frames:
    """A parser of a stream's lines.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._members: dict[str, str] = {}

    def read(self, line: bytes) -> NodeEvent | None:
        """Parse a line, and return the event that it completes."""
        text = line.decode().rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name:
                self._members[name] = value.removeprefix(" ")
            return None
        members, self._members = self._members, {}
        if "data" not in members:
            return None
        kind, event_id = members.get("event", "message"), members.get("id", "")
        return NodeEvent(kind, json.loads(members["data"]), event_id)
