"""Routes of the event stream and of recent refusals."""

from __future__ import annotations

import msgspec
from aiohttp import web

from agentd.events import Event, EventLog
from agentd.http.callers import caller_of
from agentd.http.responses import json_response
from agentd.http.streaming.streaming_responses import Streams, stream_events
from agentd.rpc import rendering
from agentd.rpc.visibility import Visibility
from agentd.services.refusals import Refusals


class EventHandlers:
    """Events and refusals, filtered for each caller."""

    def __init__(
        self, events: EventLog, refusals: Refusals, visibility: Visibility, streams: Streams
    ) -> None:
        self._events = events
        self._refusals = refusals
        self._visibility = visibility
        self._streams = streams

    async def list_refusals(self, request: web.Request) -> web.Response:
        """List the creates refused in the last hour with their reasons, oldest first."""
        caller = caller_of(request)
        recent = self._refusals.recent()
        return json_response([rendering.refusal_view(r) for r in recent if caller.sees(r.agent_id)])

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        """Stream changes of kernels, devices, plugins and runtimes as server-sent events."""
        caller = caller_of(request)

        def encode(event: Event) -> bytes:
            visible = self._visibility.visible_event(event, caller)
            if visible is None:
                return b""
            kind, content = visible
            event_id, at = self._events.event_id(event), rendering.format_time(event.at)
            # A field that readers may not know comes first: some take it for the end of an event.
            head = f"at: {at}\nid: {event_id}\nevent: {kind}\ndata: "
            return head.encode() + msgspec.json.encode(content) + b"\n\n"

        with self._streams.register(request):
            return await stream_events(request, self._events, encode)
