"""Reports of nodes to the fleet, and their encoding.

There are two, since one changes rarely and the other with every kernel: `NodeReport` (capacity) and
`FreeReport` (free amounts). A node may write anything: one with an unreadable report, or one of a
newer schema, is listed, and no kernel is placed there.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from agentd.core.names import is_name, shortened
from agentd.core.slots import (
    MAX_SLOT_NAME,
    AmountError,
    ResourceSlots,
    SlotKind,
    SlotName,
    SlotType,
    format_amount,
    is_slot_name,
    parse_base_units,
)
from agentd.views import AgentView, DeviceView, NodeView, SlotTypeView, SlotUseView
from agentd_fleet.view.fleet_view import NOTHING, FleetNode, NodeStatus, Offer

SCHEMA = 1
MOST_SLOT_TYPES = 256
"""Maximum slot types that one node can add to the fleet."""
UNREADABLE = (msgspec.MsgspecError, AmountError, ValueError, RecursionError)
NOT_THERE = ("gone", "unhealthy", "withheld")
"""States of devices without capacity."""


class SlotTypeReport(msgspec.Struct, frozen=True):
    """A slot type in a report; `quantum` is a plain decimal, in bytes or in wholes."""

    name: str
    kind: SlotKind
    quantum: str
    exclusive_group: str | None = None
    unit: str = ""
    primary: str | None = None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a node; amounts are plain decimals by agent and slot.

    `capacity` is that of the whole node, where a device that several agents share counts once.
    """

    schema: int = SCHEMA
    install_id: str
    boot_id: str
    version: str
    url: str
    labels: dict[str, str] = {}
    state: NodeStatus = NodeStatus.READY
    generation: int = 0
    agents: dict[str, dict[str, str]] = {}
    capacity: dict[str, str] = {}
    models: dict[str, list[str]] = {}
    slot_types: list[SlotTypeReport] = []


class FreeReport(msgspec.Struct, frozen=True):
    """The free and allocated amounts of each agent, and the free amounts of the node."""

    agents: dict[str, dict[str, str]] = {}
    allocated: dict[str, dict[str, str]] = {}
    node: dict[str, str] = {}


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """The lasting record of a node whose lease has ended, until it is forgotten."""

    schema: int = SCHEMA
    first_seen: str
    url: str
    slot_types: list[SlotTypeReport] = []

    @classmethod
    def of(cls, node: FleetNode) -> KnownNode:
        """Return the lasting record of a node that was just lost."""
        types = [slot_type_report(slot) for slot in node.slot_types.values()]
        seen = datetime.fromtimestamp(node.seen_at, UTC).isoformat()
        return cls(first_seen=seen, url=node.url, slot_types=types)


def first_seen(known: bytes | None) -> str:
    """Return the time of a node's first report by its lasting record, or now without one."""
    try:
        if known is not None:
            return msgspec.json.decode(known, type=KnownNode).first_seen
    except UNREADABLE:
        pass
    return datetime.now(UTC).isoformat()


def known_in(node_id: str, value: bytes) -> FleetNode:
    """Return a lost node from its lasting record; an unreadable one is lost, too."""
    try:
        if msgspec.json.decode(value, type=_ReportHeader).schema > SCHEMA:
            return FleetNode(node_id, {}, {}, NodeStatus.LOST)
        known = msgspec.json.decode(value, type=KnownNode)
        types = _slot_types(tuple(known.slot_types))
        return FleetNode(
            node_id, types, {}, NodeStatus.LOST, known.url, remark=unreachable(known.url)
        )
    except UNREADABLE:
        return FleetNode(node_id, {}, {}, NodeStatus.LOST)


class _ReportHeader(msgspec.Struct, frozen=True):
    schema: int
    url: str = ""
    version: str = ""


class NodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of a daemon; with `is_down` it does not answer, and the rest is the last one."""

    node_id: str
    version: str
    generation: int
    agents: dict[str, dict[str, str]]
    capacity: dict[str, str]
    free: FreeReport
    models: dict[str, list[str]]
    slot_types: list[SlotTypeReport]
    is_down: bool = False

    def reported(
        self, *, install_id: str, boot_id: str, url: str, labels: Mapping[str, str]
    ) -> NodeReport:
        """Return the report of a reading."""
        return NodeReport(
            install_id=install_id,
            boot_id=boot_id,
            version=self.version,
            url=url,
            labels=dict(labels),
            state=NodeStatus.DAEMON_DOWN if self.is_down else NodeStatus.READY,
            generation=self.generation,
            agents=self.agents,
            capacity=self.capacity,
            models=self.models,
            slot_types=self.slot_types,
        )


def reading_of(
    node: NodeView,
    slot_types: list[SlotTypeView],
    agents: list[AgentView],
    devices: list[DeviceView],
) -> NodeReading:
    """Combine the answers of a daemon."""
    kinds = {slot["name"]: SlotKind(slot["kind"]) for slot in slot_types}
    shown = {
        what: {a["agent_id"]: _amounts(a, what) for a in agents}
        for what in ("capacity", "allocated", "free")
    }
    return NodeReading(
        node_id=node["id"],
        version=node["version"],
        generation=node["generation"],
        agents=shown["capacity"],
        capacity=_whole(kinds, shown["capacity"], devices, "capacity"),
        free=FreeReport(
            shown["free"], shown["allocated"], _whole(kinds, shown["free"], devices, "free")
        ),
        models={
            agent["agent_id"]: sorted(
                {d["model"] for d in devices if d["model"] and agent["agent_id"] in d["agents"]}
            )
            for agent in agents
        },
        slot_types=[
            SlotTypeReport(
                t["name"],
                SlotKind(t["kind"]),
                t["quantum"],
                t["exclusive_group"],
                t["unit"],
                t.get("primary"),
            )
            for t in slot_types
        ],
    )


def _whole(
    kinds: Mapping[str, SlotKind],
    agents: Mapping[str, Mapping[str, str]],
    devices: list[DeviceView],
    what: Literal["capacity", "free"],
) -> dict[str, str]:
    """Return the amounts of a whole node.

    They are at most the sum over its agents, which may share devices, and at most the sum over its
    devices, which may belong to no agent in part.
    """
    of_agents, of_devices = Counter[str](), Counter[str]()
    for amounts in agents.values():
        for name, amount in amounts.items():
            of_agents[name] += parse_base_units(amount, kinds[name])
    for device in devices:
        if not device["agents"] or device["state"] in NOT_THERE:
            continue
        for slot, use in _uses_of(device).items():
            if slot in kinds:
                of_devices[slot] += parse_base_units(use[what], kinds[slot])
    return {
        name: format_amount(min(amount, of_devices[name]), kinds[name])
        for name, amount in of_agents.items()
    }


def _uses_of(device: DeviceView) -> Mapping[str, SlotUseView]:
    """Return the slots of a device; an older daemon shows its only one."""
    only = SlotUseView(
        capacity=device["capacity"], allocated=device["allocated"], free=device["free"]
    )
    return device.get("slots", {device["slot"]: only})


def _amounts(agent: AgentView, what: str) -> dict[str, str]:
    slots: Mapping[str, Any] = agent["slots"]
    return {name: use[what] for name, use in slots.items()}


class Published(NamedTuple):
    """The published capacity of a node, parsed once for all of its free amounts."""

    node: FleetNode
    capacity: ResourceSlots | None = None


def published_in(node_id: str, report: bytes, *, seen_at: float) -> Published:
    """Parse a node's report; one that is unreadable has a `remark`."""
    try:
        header = msgspec.json.decode(report, type=_ReportHeader)
        if header.schema > SCHEMA:
            why = f"schema {header.schema} is newer than this gateway's, {SCHEMA}"
            listed = _listed(node_id, why, url=header.url, seen_at=seen_at)
            return listed._replace(node=replace(listed.node, status=NodeStatus.NEWER))
        said = msgspec.json.decode(report, type=NodeReport)
        node = _node(node_id, said, seen_at)
        return Published(node, _slots(said.capacity, node.slot_types) if said.capacity else None)
    except UNREADABLE as error:
        return _listed(node_id, f"unreadable report: {error}", seen_at=seen_at)


def with_free(published: Published, free: bytes | None) -> FleetNode:
    """Return a node with its reported free amounts."""
    node = published.node
    if free is None or node.remark:
        return node
    try:
        left = msgspec.json.decode(free, type=FreeReport)
        types = node.slot_types
        offers = {
            agent: Offer(
                offer.capacity,
                _slots(left.agents.get(agent, {}), types),
                _slots(left.allocated.get(agent, {}), types),
            )
            for agent, offer in node.offers.items()
        }
        capacity = published.capacity
        whole = None if capacity is None else Offer(capacity, _slots(left.node, types))
    except UNREADABLE as error:
        return replace(node, remark=f"unreadable free amounts: {error}")
    return replace(node, offers=offers, whole=whole)


def _listed(node_id: str, remark: str, *, seen_at: float, url: str = "") -> Published:
    return Published(FleetNode(node_id, {}, {}, url=url, seen_at=seen_at, remark=remark))


def _node(node_id: str, said: NodeReport, seen_at: float) -> FleetNode:
    if odd := [agent for agent in said.agents if not is_name(agent)]:
        raise ValueError(f"invalid agent id {shortened(odd[0])}")
    types = _slot_types(tuple(said.slot_types))
    return FleetNode(
        node_id,
        types,
        {agent: Offer(_slots(held, types), NOTHING) for agent, held in said.agents.items()},
        said.state,
        said.url,
        said.labels,
        said.generation,
        seen_at,
        unreachable(said.url),
        {agent: frozenset(names) for agent, names in said.models.items()},
    )


@lru_cache(maxsize=256)
def _slot_types(said: tuple[SlotTypeReport, ...]) -> Mapping[SlotName, SlotType]:
    """Return slot types by name; nodes of one kind share one mapping."""
    if len(said) > MOST_SLOT_TYPES:
        raise ValueError(f"{len(said)} slot types exceed the limit of {MOST_SLOT_TYPES}")
    return MappingProxyType({item.name: slot_type_in(item) for item in said})


def unreachable(url: str) -> str:
    """Return why a gateway does not call an address, empty if it does.

    A call would send its token there.
    """
    if not url:
        return "it published no address"
    if url.startswith("unix:/"):
        return "" if url.isprintable() else "its address is malformed"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return "its address is malformed"
    if not host or not url.isprintable() or parts.path.strip("/") or parts.username is not None:
        return "its address is not https://host:port"
    if parts.scheme == "https" or (parts.scheme == "http" and _is_near(host)):
        return ""
    return "its address is not https"


def _is_near(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def slot_type_in(item: SlotTypeReport) -> SlotType:
    """Parse a slot type.

    Raises:
        ValueError: the slot type is invalid.
    """
    if not is_slot_name(item.name):
        raise ValueError(f"invalid slot name {item.name[:MAX_SLOT_NAME]!r}")
    quantum = parse_base_units(item.quantum, item.kind)
    if quantum < 1:
        raise ValueError(f"invalid quantum of {item.name}: {item.quantum}")
    return SlotType(
        item.name, item.kind, quantum, item.exclusive_group, item.unit, primary=item.primary
    )


def slot_type_report(slot: SlotType) -> SlotTypeReport:
    """Return a slot type for a report."""
    quantum = format_amount(slot.quantum, slot.kind)
    return SlotTypeReport(
        slot.name, slot.kind, quantum, slot.exclusive_group, slot.unit, slot.primary
    )


def _slots(raw: Mapping[str, str], types: Mapping[SlotName, SlotType]) -> ResourceSlots:
    return ResourceSlots(
        {name: _amount(raw[name], types[name].kind) for name in raw if name in types}
    )


@lru_cache(maxsize=4096)
def _amount(text: str, kind: SlotKind) -> int:
    """Parse an amount to base units, cached: nearly all are among a few hundred."""
    return parse_base_units(text, kind)
