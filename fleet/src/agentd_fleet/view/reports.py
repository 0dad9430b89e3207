"""Reports of nodes to the fleet, and their encoding.

There are two, since one changes rarely and the other with every kernel: `NodeReport` (capacity) and
`FreeReport` (free amounts). A node may write anything: one with an unreadable report, or one of a
newer schema, is listed with the reason, and no kernel is placed there. A value that only newer
versions know (a state, a kind of slot) leaves the others of its report as they are.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from agentd.core.names import is_name, quote_untrusted, validate_name
from agentd.core.slots import (
    MAX_SLOT_NAME,
    ResourceSlots,
    SlotKind,
    SlotName,
    SlotType,
    format_amount,
    is_slot_name,
    parse_base_units,
)
from agentd.errors import AgentdError
from agentd_fleet.view.fleet_view import NO_SLOTS, Cordon, FleetNode, NodeRuntime, NodeStatus, Offer

_T = TypeVar("_T")
_Generation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A larger one would fail the encoding of every list that contains the node."""
SCHEMA = 1
MAX_SLOT_TYPES = 256
"""Maximum slot types that one node can add to the fleet."""
MAX_REASON = 300
"""Maximum characters of the reason why a node cannot be read."""
UNREADABLE = (ValueError, RecursionError)
"""Errors that an answer or a value of a node causes here."""
NO_CAPACITY_STATES = ("gone", "unhealthy", "withheld")
"""States of devices without capacity."""


class SlotTypeReport(msgspec.Struct, frozen=True):
    """A slot type in a report; `quantum` is a plain decimal, in bytes or in wholes.

    A slot of a kind that is not a `SlotKind` is left out, with its amounts.
    """

    name: str
    kind: str
    quantum: str
    exclusive_group: str | None = None
    unit: str = ""
    primary: str | None = None


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a node; amounts are plain decimals by agent and slot.

    `capacity` is that of the whole node, where a device that several agents share counts once.
    """

    version: str = ""
    reason: str = ""
    generation: _Generation = 0
    agents: dict[str, dict[str, str]] = {}
    capacity: dict[str, str] = {}
    models: dict[str, list[str]] = {}
    slot_types: list[SlotTypeReport] = []
    runtime: NodeRuntime | None = None


class NodeReport(NodeCapacity, frozen=True, kw_only=True):
    """The report of a node: its identity, its address and its capacity."""

    schema: int = SCHEMA
    install_id: str
    boot_id: str
    url: str
    labels: dict[str, str] = {}
    state: str = NodeStatus.READY


class FreeReport(msgspec.Struct, frozen=True):
    """The free and allocated amounts of each agent, and the free amounts of the node."""

    agents: dict[str, dict[str, str]] = {}
    allocated: dict[str, dict[str, str]] = {}
    node: dict[str, str] = {}


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """The lasting record of a node whose lease has ended, until it is forgotten.

    A `rival` is the address of another publisher that waits for the node id; without etcd, it has a
    line for each address that answered with the id while the node's own address did, too.
    """

    schema: int = SCHEMA
    first_seen: str
    url: str
    slot_types: list[SlotTypeReport] = []
    rival: str = ""


def known_record(
    stored: bytes | None, url: str, slot_types: list[SlotTypeReport] | None, rival: str = ""
) -> bytes:
    """Return a node's lasting record, with the time of its first report by the stored one.

    Without slot types it has those of the stored one.
    """
    record = KnownNode(first_seen=datetime.now(UTC).isoformat(), url=url)
    if stored is not None:
        with suppress(*UNREADABLE):
            record = msgspec.json.decode(stored, type=KnownNode)
    types = record.slot_types if slot_types is None else slot_types
    return msgspec.json.encode(
        KnownNode(first_seen=record.first_seen, url=url, slot_types=types, rival=rival)
    )


def parse_known_node(node_id: str, value: bytes) -> FleetNode:
    """Return a lost node from its lasting record; an unreadable one is lost, too."""
    node = FleetNode(node_id, {}, {}, NodeStatus.LOST)
    try:
        if msgspec.json.decode(value, type=_ReportHeader).schema <= SCHEMA:
            record = msgspec.json.decode(value, type=KnownNode)
            types, reason = _slot_types(tuple(record.slot_types)), unreachable_reason(record.url)
            node = replace(node, slot_types=types, url=record.url, exclusion_reason=reason)
    except UNREADABLE:
        pass
    return node


def parse_cordon(value: bytes) -> Cordon:
    """Parse a stored cordon; one that is unreadable keeps new kernels off the node, too."""
    try:
        return msgspec.json.decode(value, type=Cordon)
    except UNREADABLE as error:
        return Cordon(unreadable_reason(error))


class _ReportHeader(msgspec.Struct, frozen=True):
    schema: int
    url: str = ""
    version: str = ""


class NodeReading(NodeCapacity, frozen=True, kw_only=True):
    """A reading of a daemon.

    With a `reason` its answers cannot be read; with `is_down`, too, no node answers. Then the rest
    is that of the last good reading, and `node_id` is empty before the first answer.
    """

    node_id: str = ""
    free: FreeReport = FreeReport()
    is_down: bool = False

    def to_report(
        self, *, install_id: str, boot_id: str, url: str, labels: Mapping[str, str]
    ) -> NodeReport:
        """Return the report of a reading."""
        return NodeReport(
            install_id=install_id,
            boot_id=boot_id,
            url=url,
            labels=dict(labels),
            state=NodeStatus.DAEMON_DOWN if self.is_down else NodeStatus.READY,
            **{name: getattr(self, name) for name in NodeCapacity.__struct_fields__},
        )


class _NodeAnswer(msgspec.Struct, frozen=True):
    """The members of `GET /v1/node` that the fleet uses."""

    id: str
    generation: _Generation
    version: str = ""
    runtime: NodeRuntime | None = None


class _UsageAnswer(msgspec.Struct, frozen=True):
    capacity: str
    allocated: str
    free: str


class _AgentAnswer(msgspec.Struct, frozen=True):
    agent_id: str
    slots: dict[str, _UsageAnswer]


class _DeviceAnswer(msgspec.Struct, frozen=True):
    agents: list[str]
    state: str
    slots: dict[str, _UsageAnswer]
    model: str = ""


def parse_node_answer(answer: object) -> _NodeAnswer:
    """Parse the answer of `GET /v1/node`.

    Raises:
        UNREADABLE: see `parse_reading`.
    """
    return _convert(answer, _NodeAnswer, "node")


def _convert(answer: object, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.convert(answer, kind)
    except ValueError as error:
        raise ValueError(f"GET /v1/{path}: {error}") from None


def parse_reading(node: object, slot_types: object, agents: object, devices: object) -> NodeReading:
    """Combine the answers of a daemon.

    Raises:
        UNREADABLE: an answer lacks a member, or has one with another type or value.
    """
    node_answer = parse_node_answer(node)
    types = _convert(slot_types, list[SlotTypeReport], "slot-types")
    agent_answers = _convert(agents, list[_AgentAnswer], "agents")
    device_answers = _convert(devices, list[_DeviceAnswer], "devices")
    kinds = {name: slot.kind for name, slot in _slot_types(tuple(types)).items()}
    offers = {
        member: {
            agent.agent_id: {name: getattr(usage, member) for name, usage in agent.slots.items()}
            for agent in agent_answers
        }
        for member in ("capacity", "allocated", "free")
    }
    models: dict[str, set[str]] = {agent.agent_id: set() for agent in agent_answers}
    for device in device_answers:
        for agent_id in models.keys() & device.agents:
            models[agent_id].add(device.model)
    reading = NodeReading(
        node_id=validate_name(node_answer.id),
        version=node_answer.version,
        generation=node_answer.generation,
        agents=offers["capacity"],
        capacity=_node_amounts(kinds, offers["capacity"], device_answers, "capacity"),
        free=FreeReport(
            offers["free"],
            offers["allocated"],
            _node_amounts(kinds, offers["free"], device_answers, "free"),
        ),
        models={agent_id: sorted(names - {""}) for agent_id, names in models.items()},
        slot_types=types,
        runtime=node_answer.runtime,
    )
    report = reading.to_report(install_id="", boot_id="", url="", labels={})
    _with_free(ParsedReport(_parse_report(reading.node_id, report, 0.0)), reading.free)
    msgspec.json.encode(reading)  # a text may have half a character
    return reading


def _node_amounts(
    kinds: Mapping[str, SlotKind],
    agents: Mapping[str, Mapping[str, str]],
    devices: list[_DeviceAnswer],
    member: Literal["capacity", "free"],
) -> dict[str, str]:
    """Return the amounts of a whole node.

    They are at most the sum over its agents, which may share devices, and at most the sum over its
    devices, which may belong to no agent in part.
    """
    by_agents, by_devices = Counter[str](), Counter[str]()
    for amounts in agents.values():
        for name, amount in amounts.items():
            if name in kinds:
                by_agents[name] += parse_base_units(amount, kinds[name])
    for device in devices:
        if not device.agents or device.state in NO_CAPACITY_STATES:
            continue
        for slot, usage in device.slots.items():
            if slot in kinds:
                by_devices[slot] += parse_base_units(getattr(usage, member), kinds[slot])
    return {
        name: format_amount(min(amount, by_devices[name]), kinds[name])
        for name, amount in by_agents.items()
    }


class ParsedReport(msgspec.Struct, frozen=True):
    """The published capacity of a node, parsed once for all of its free amounts."""

    node: FleetNode
    capacity: ResourceSlots | None = None


def parse_node_report(node_id: str, report: bytes, *, seen_at: float) -> ParsedReport:
    """Parse a node's report; one that is unreadable has a `exclusion_reason`."""
    try:
        header = msgspec.json.decode(report, type=_ReportHeader)
        if header.schema > SCHEMA:
            reason = f"schema {header.schema} is newer than this gateway's, {SCHEMA}"
            published = _unreadable_node(node_id, reason, url=header.url, seen_at=seen_at)
            return replace(published, node=replace(published.node, status=NodeStatus.NEWER))
        node_report = msgspec.json.decode(report, type=NodeReport)
        node = _parse_report(node_id, node_report, seen_at)
        capacity = node_report.capacity
        return ParsedReport(node, _parse_slots(capacity, node.slot_types) if capacity else None)
    except UNREADABLE as error:
        return _unreadable_node(node_id, unreadable_reason(error), seen_at=seen_at)


def with_free(published: ParsedReport, free: bytes | None) -> FleetNode:
    """Return a node with its reported free amounts."""
    node = published.node
    if free is None:
        return node
    try:
        return _with_free(published, msgspec.json.decode(free, type=FreeReport))
    except UNREADABLE as error:
        return replace(node, exclusion_reason=node.exclusion_reason or unreadable_reason(error))


def _with_free(published: ParsedReport, free: FreeReport) -> FleetNode:
    node, types = published.node, published.node.slot_types
    offers = {
        agent: Offer(
            offer.capacity,
            _parse_slots(free.agents.get(agent, {}), types),
            _parse_slots(free.allocated.get(agent, {}), types),
        )
        for agent, offer in node.offers.items()
    }
    capacity = published.capacity
    whole = None if capacity is None else Offer(capacity, _parse_slots(free.node, types))
    return replace(node, offers=offers, whole=whole)


def unreadable_reason(error: Exception) -> str:
    """Return the reason of a node that cannot be read."""
    text = str(error) if isinstance(error, (AgentdError, *UNREADABLE)) else repr(error)
    return reason_line(f"unreadable: {text}")


def reason_line(text: str) -> str:
    """Return a node's text as one printable line of limited length."""
    line = " ".join(text.split())[:MAX_REASON]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)[:MAX_REASON]


def _unreadable_node(node_id: str, remark: str, *, seen_at: float, url: str = "") -> ParsedReport:
    return ParsedReport(
        FleetNode(node_id, {}, {}, url=url, seen_at=seen_at, exclusion_reason=remark)
    )


def _parse_report(node_id: str, report: NodeReport, seen_at: float) -> FleetNode:
    if invalid := [agent for agent in report.agents if not is_name(agent)]:
        raise ValueError(f"invalid agent id {quote_untrusted(invalid[0])}")
    types = _slot_types(tuple(report.slot_types))
    status, reason = NodeStatus.READY, report.reason
    if report.state in [*NodeStatus]:
        status = NodeStatus(report.state)
    elif not reason:
        reason = f"unreadable: unknown state {quote_untrusted(report.state)}"
    return FleetNode(
        node_id=node_id,
        slot_types=types,
        offers={
            agent: Offer(_parse_slots(amounts, types), NO_SLOTS)
            for agent, amounts in report.agents.items()
        },
        status=status,
        url=report.url,
        labels=report.labels,
        generation=report.generation,
        seen_at=seen_at,
        exclusion_reason=reason_line(reason) or unreachable_reason(report.url),
        models={agent: frozenset(names) for agent, names in report.models.items()},
        runtime=report.runtime,
    )


@lru_cache(maxsize=256)
def _slot_types(reports: tuple[SlotTypeReport, ...]) -> Mapping[SlotName, SlotType]:
    """Return slot types by name, without those of an unknown kind.

    Nodes with the same types share one mapping.
    """
    if len(reports) > MAX_SLOT_TYPES:
        raise ValueError(f"{len(reports)} slot types exceed the limit of {MAX_SLOT_TYPES}")
    known = [report for report in reports if report.kind in [*SlotKind]]
    return MappingProxyType({report.name: parse_slot_type(report) for report in known})


def unreachable_reason(url: str) -> str:
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
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)):
        return ""
    return "its address is not https"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_slot_type(item: SlotTypeReport) -> SlotType:
    """Parse a slot type.

    Raises:
        ValueError: the slot type is invalid.
    """
    if not is_slot_name(item.name):
        raise ValueError(f"invalid slot name {item.name[:MAX_SLOT_NAME]!r}")
    if len(item.unit + (item.exclusive_group or "") + (item.primary or "")) > 3 * MAX_SLOT_NAME:
        raise ValueError(f"too long a unit, group or primary slot of {item.name}")
    kind = SlotKind(item.kind)
    quantum = parse_base_units(item.quantum, kind)
    if quantum < 1:
        raise ValueError(f"invalid quantum of {item.name}: {item.quantum}")
    return SlotType(item.name, kind, quantum, item.exclusive_group, item.unit, primary=item.primary)


def slot_type_report(slot: SlotType) -> SlotTypeReport:
    """Return a slot type for a report."""
    quantum = format_amount(slot.quantum, slot.kind)
    return SlotTypeReport(
        slot.name, slot.kind, quantum, slot.exclusive_group, slot.unit, slot.primary
    )


def _parse_slots(texts: Mapping[str, str], types: Mapping[SlotName, SlotType]) -> ResourceSlots:
    return ResourceSlots(
        {name: _parse_amount(texts[name], types[name].kind) for name in texts if name in types}
    )


@lru_cache(maxsize=4096)
def _parse_amount(text: str, kind: SlotKind) -> int:
    """Parse an amount to base units, cached: nearly all are among a few hundred."""
    return parse_base_units(text, kind)
