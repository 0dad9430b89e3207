"""Server-sent events, encoded once for all clients that see the same.

See https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import msgspec

MAX_KEPT, MAX_KEPT_BYTES = 256, 4 << 20
"""Encoded events, and their bytes, that stay cached for slower clients."""


def encode_event(event_id: str, kind: str, content: object) -> bytes:
    """Return a server-sent event with JSON data."""
    head = f"id: {event_id}\nevent: {kind}\ndata: "
    return head.encode() + msgspec.json.encode(content) + b"\n\n"


class EncodedEvents:
    """A cache of recent events, encoded for each audience."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._bytes = 0

    def of(self, event: Hashable, audience: Hashable, encode: Callable[[], bytes]) -> bytes:
        """Return an event encoded for an audience; `encode` is called on a cache miss."""
        key = event, audience
        if (known := self._kept.get(key)) is None:
            known = self._kept[key] = encode()
            self._bytes += len(known)
            while len(self._kept) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return known
