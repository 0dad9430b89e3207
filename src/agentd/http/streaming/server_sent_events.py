"""Server-sent events, encoded once for all readers that see the same.

See https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import msgspec

MAX_KEPT = 256
"""Encoded events that are kept for readers that come to them later."""


def encode_event(event_id: str, kind: str, content: object) -> bytes:
    """Return a server-sent event with JSON data."""
    head = f"id: {event_id}\nevent: {kind}\ndata: "
    return head.encode() + msgspec.json.encode(content) + b"\n\n"


class EncodedEvents:
    """The latest events as they are sent to each audience."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()

    def of(self, event: Hashable, audience: Hashable, encode: Callable[[], bytes]) -> bytes:
        """Return an event as an audience sees it; `encode` is called if that is not known yet."""
        key = event, audience
        if (known := self._kept.get(key)) is None:
            known = self._kept[key] = encode()
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return known
