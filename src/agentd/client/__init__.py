"""The client library: typed calls of one daemon's API, with and without asyncio.

`agentd.client.AsyncClient` and `agentd.client.Client`; see docs/reference/client.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentd.client.blocking import Client
from agentd.client.creates import new_kernel_id
from agentd.client.events import NodeEvent

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient

__all__ = ["AsyncClient", "Client", "NodeEvent", "new_kernel_id"]


def __getattr__(name: str) -> object:
    """Import the asyncio client, which requires aiohttp, on first use."""
    if name == "AsyncClient":
        from agentd.client.asynchronous import AsyncClient  # noqa: PLC0415

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
