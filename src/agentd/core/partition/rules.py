"""The rules by which an operator assigns devices to agents.

Text and TOML values become one of four rules here; which devices a rule selects on a
node is decided by `agentd.core.partition.split`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

import msgspec

from agentd.core.devices import DeviceId
from agentd.core.hardware_names import normal_name
from agentd.core.slots import AmountError, SlotKind, parse_base_units, parse_quantity

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")
_RANGE = re.compile(r"([A-Za-z_:.-]*)([0-9]+)-\1?([0-9]+)")
_MAX_RANGE = 4096


class AllocationMode(StrEnum):
    """The ways to divide devices among the agents of the node."""

    SHARED = "shared"
    AUTO_SPLIT = "auto-split"
    MANUAL = "manual"


class SplitOrder(StrEnum):
    """In which order auto-split deals devices."""

    ID = "id"
    NUMA = "numa"
    PLUGIN = "plugin"


class Ids(msgspec.Struct, frozen=True):
    """Exactly these devices, by id, stable id or alias."""

    names: tuple[str, ...]


class Count(msgspec.Struct, frozen=True):
    """So many of the devices that nobody names."""

    count: int


class Percent(msgspec.Struct, frozen=True):
    """A part of what the node has after the reservation."""

    percent: Fraction

    def __str__(self) -> str:
        return f"{float(self.percent):g}%"


class Size(msgspec.Struct, frozen=True):
    """So many bytes."""

    size_bytes: int


class Amount(msgspec.Struct, frozen=True):
    """An amount as it was written; its unit is that of the device name it is for."""

    text: str


DeviceRule: TypeAlias = Ids | Count | Percent
MemoryRule: TypeAlias = Size | Percent
LimitRule: TypeAlias = Amount | Percent

DEVICE_RULE_FORMS = (
    'a list of ids (["0", "1"]), a range ("0-3"), a count (2), a percentage ("50%") or "all"'
)
MEMORY_RULE_FORMS = 'a size ("16g") or a percentage ("50%")'


class AgentRule(msgspec.Struct, frozen=True):
    """The rules of one agent; `described` if devices are written down for it.

    `limits` are by device name.
    """

    agent_id: str
    cpu: DeviceRule | None = None
    mem: MemoryRule | None = None
    devices: Mapping[str, DeviceRule] = {}
    described: bool = False
    limits: Mapping[str, LimitRule] = {}


class SplitRules(msgspec.Struct, frozen=True):
    """Everything the partition follows from, apart from the devices themselves.

    `exclude` has the devices that no agent gets, by device name: ids, stable ids, aliases and
    parents. `forgotten` are devices that the node had.
    """

    mode: AllocationMode
    agents: tuple[AgentRule, ...]
    reserved_cpu: int | tuple[str, ...] = 0
    reserved_mem: int = 0
    align: int = 1
    order: SplitOrder = SplitOrder.ID
    exclude: Mapping[str, tuple[str, ...]] = {}
    forgotten: frozenset[DeviceId] = frozenset()

    @property
    def uses_plugin_order(self) -> bool:
        """Whether plugins may deal their devices themselves."""
        is_split = self.mode is AllocationMode.AUTO_SPLIT and bool(self.agents)
        return is_split and self.order is SplitOrder.PLUGIN


def parse_device_rule(raw: object) -> DeviceRule:
    """Read a TOML value as a device rule.

    Raises:
        ValueError: it has none of the forms in `DEVICE_RULE_FORMS`.
    """
    if isinstance(raw, list) and all(
        isinstance(item, (str, int)) and not isinstance(item, bool) for item in raw
    ):
        names = tuple(str(item) for item in raw)
        if len({*map(normal_name, names)}) < len(names):
            raise ValueError("names a device twice")
        return Ids(names)
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return Count(raw)
    if isinstance(raw, str):
        if raw == "all":
            return Percent(Fraction(100))
        return _parse_percent(raw) or Ids(_parse_ranges(raw))
    raise ValueError(f"invalid rule {raw!r}: expected {DEVICE_RULE_FORMS}")


def parse_memory_rule(raw: object) -> MemoryRule:
    """Read a TOML value as a memory rule.

    Raises:
        ValueError: it has none of the forms in `MEMORY_RULE_FORMS`.
    """
    if isinstance(raw, str) and (percent := _parse_percent(raw)) is not None:
        return percent
    try:
        return Size(parse_base_units(raw, SlotKind.BYTES))
    except AmountError as error:
        raise ValueError(f"{error}; write {MEMORY_RULE_FORMS}") from None


def parse_limit_rule(raw: object) -> LimitRule:
    """Read a TOML value as a limit.

    Raises:
        ValueError: it is neither an amount nor a percentage.
    """
    if isinstance(raw, str) and (percent := _parse_percent(raw)) is not None:
        return percent
    try:
        parse_quantity(raw)
    except AmountError as error:
        raise ValueError(f'{error}; write an amount (0.5) or a percentage ("50%")') from None
    return Amount(str(getattr(raw, "text", raw)))


def _parse_percent(text: str) -> Percent | None:
    match = _PERCENT.fullmatch(text.strip())
    if not match:
        if text.rstrip().endswith("%"):
            raise ValueError(f'invalid percentage {text!r}: expected "0%" to "100%"')
        return None
    percent = Fraction(match[1])
    if percent > 100:  # noqa: PLR2004 - a percentage
        raise ValueError(f"{text!r} is more than 100%")
    return Percent(percent)


def _parse_ranges(text: str) -> tuple[str, ...]:
    names: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if match := _RANGE.fullmatch(part):
            first, last = int(match[2]), int(match[3])
            if not first <= last < first + _MAX_RANGE:
                raise ValueError(f"{part!r} runs backwards, or names over {_MAX_RANGE} devices")
            names += [f"{match[1]}{number}" for number in range(first, last + 1)]
        elif part:
            names.append(part)
        else:
            raise ValueError(f"invalid rule {text!r}: expected {DEVICE_RULE_FORMS}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(names)
