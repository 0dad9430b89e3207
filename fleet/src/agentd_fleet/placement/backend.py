"""The backend of a gateway: the store, the state, and the connections to nodes."""

from __future__ import annotations

import msgspec

from agentd_fleet.nodes.calls import Nodes
from agentd_fleet.store.route import Store
from agentd_fleet.view.fleet_state import FleetState


class FleetBackend(msgspec.Struct, frozen=True):
    """The store of routes, the state folded from reports, and the connections to nodes."""

    store: Store
    state: FleetState
    nodes: Nodes
