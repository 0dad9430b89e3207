"""The values of a node that most of its parts are given together."""

from __future__ import annotations

import msgspec

from agentd.events import EventLog
from agentd.services.claims.counts import ClaimCounts
from agentd.services.counts import NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Clock
from agentd.services.state import NodeState


class NodeContext(msgspec.Struct, frozen=True):
    """The node's id, the boot of its host, and its clocks."""

    node_id: str
    boot_id: str
    clock: Clock


class Node(msgspec.Struct, frozen=True):
    """The node as it is now, with its events and counters."""

    state: NodeState
    devices: NodeDevices
    events: EventLog
    counts: NodeCounts
    claim_counts: ClaimCounts
