"""The client library: typed calls of one daemon's API, with and without asyncio.

`agentd.client.AsyncClient` and `agentd.client.Client`; see docs/reference/client.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient
    from agentd.client.blocking import Client
    from agentd.client.creates import new_kernel_id
    from agentd.client.events import NodeEvent

__all__ = ["AsyncClient", "Client", "NodeEvent", "new_kernel_id"]
_MODULES = {
    "AsyncClient": "asynchronous",
    "Client": "blocking",
    "NodeEvent": "events",
    "new_kernel_id": "creates",
}


def __getattr__(name: str) -> object:
    """Import a name on first use: aiohttp and http.client are slow to load."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
