"""Slots: the resources of requests, and their amounts.

Inside agentd an amount is an `int` in the slot's base unit: bytes for `bytes` slots, millionths for
`count` and `unique` slots. Text and decimals exist only at the edges (configuration, wire), and the
functions here are those edges. Nothing is ever rounded: an amount that cannot be represented is
refused, with the nearest valid amounts.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple, Self, TypeAlias

import msgspec

from agentd.errors import (
    InvalidRequest,
    InvalidSlotAmount,
    InvalidSlotCombination,
    PluginUnavailable,
    Problem,
    UnsupportedResource,
)

SlotName: TypeAlias = str

ONE = 1_000_000
"""Base units in one whole `count`: amounts are kept in millionths."""

MAX_AMOUNT = 2**63 - 1
"""The largest amount in base units: 8 EiB, or 9.2 million million devices."""

MAX_TEXT = 64
"""Maximum characters of an amount."""

CPU, MEM = "cpu", "mem"

KIB, GIB = 2**10, 2**30
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_ZERO = re.compile(
    r"[+-]?(?:0+(?:\.0*)?|\.0+)(?:e[+-]?[0-9]+)?(?: ?(?:[kmgtpe](?:i?b)?|b))?",
    re.IGNORECASE | re.ASCII,
)
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kmgtpe])(?:i?b)?|b)", re.IGNORECASE | re.ASCII)
_EXPONENT = re.compile(r"[+-]?[0-9.]+e[+-]?[0-9]+", re.IGNORECASE)
MAX_SLOT_NAME = 128
"""Maximum characters of a slot name."""

SLOT_NAME = rf"[a-z](?!.{{{MAX_SLOT_NAME}}})[a-z0-9_-]*(?:\.[A-Za-z0-9][A-Za-z0-9._:+-]*)?"
"""A device name, or a device name, a dot and more; at most `MAX_SLOT_NAME` characters."""
_SLOT_NAME = re.compile(SLOT_NAME)


class AmountError(ValueError):
    """The value is not a valid amount of a slot."""


class WrittenFloat(float):
    """A float that keeps its source text; created by the JSON and TOML parsers."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


class SlotKind(StrEnum):
    """The unit in which amounts of a slot are counted."""

    COUNT = "count"
    BYTES = "bytes"
    UNIQUE = "unique"


class SlotType(msgspec.Struct, frozen=True):
    """A slot type of this node, and the smallest step of its amounts (base units).

    `is_enforced` means that a kernel cannot use more of a device than its share. `primary` names
    the slot that a secondary one belongs to: devices that offer the one may offer the other.
    """

    name: SlotName
    kind: SlotKind
    quantum: int
    exclusive_group: str | None = None
    unit: str = ""
    is_enforced: bool = False
    primary: SlotName | None = None

    @property
    def family(self) -> SlotName:
        """The primary slot of the devices that offer it."""
        return self.primary or self.name


class SlotMeasure(msgspec.Struct, frozen=True):
    """One slot of a device: its position among the device's slots, and how it is counted.

    `usable` is the usable capacity: whole quanta, in base units.
    """

    position: int
    quantum: int
    usable: int


BUILT_IN = (
    SlotType(CPU, SlotKind.COUNT, ONE, unit="core"),
    SlotType(MEM, SlotKind.BYTES, 1, unit="byte"),
)
"""The slots of every node, without any plugin."""


def is_slot_of_parts(slot: SlotName) -> bool:
    """Return whether a slot is of parts of devices, such as `cuda.device:1g.10gb-mig`."""
    return ":" in slot


def device_name_of(slot: SlotName) -> str:
    """Return the device name of a slot, the part before the first dot."""
    return slot.partition(".")[0]


def is_slot_name(text: str) -> bool:
    """Return whether `text` is `name` or `name.rest`, such as `cuda.device:1g.10gb-mig`.

    It has at most `MAX_SLOT_NAME` characters.
    """
    return _SLOT_NAME.fullmatch(text) is not None


def is_divisible(slot: SlotType) -> bool:
    """Return whether a device can be divided: a count in steps below 1, or bytes.

    The memory of the node is one device, so nothing depends on it there.
    """
    if slot.kind is SlotKind.BYTES:
        return slot.name != MEM
    return slot.kind is SlotKind.COUNT and slot.quantum < ONE


def derived_amount(amount: int, of: int, to: int, quantum: int) -> int:
    """Return what a kernel with `amount` of one slot of a device holds of another slot of it.

    `of` and `to` are the usable capacities of the two, `quantum` is that of the other. The part is
    rounded down, and is one quantum at least.
    """
    part = amount * to // (of * quantum) * quantum if of else 0
    return max(quantum, part)


class Quantity(msgspec.Struct, frozen=True):
    """A number before its slot is known."""

    value: int | Fraction
    is_size: bool
    text: str
    """The original text, for messages."""

    def canonical(self) -> str:
        """Return one canonical spelling for equal quantities."""
        return str(self.value)


def parse_quantity(raw: object) -> Quantity:
    """Parse a JSON or TOML value as a quantity: a number, a plain decimal, or a size.

    A `Quantity` is returned as it is.

    Sizes are binary whatever their spelling: `1g`, `1GB` and `1GiB` are 2**30 bytes.

    Raises:
        AmountError: it is negative, not finite, in exponent notation, a boolean,
            or not a number.
    """
    if isinstance(raw, Quantity):
        return raw
    if isinstance(raw, AmountError):
        raise AmountError(*raw.args)
    text = _quantity_text(raw)
    if _PLAIN.fullmatch(text):
        return Quantity(_parse_number(text), is_size=False, text=text)
    if match := _SIZE.fullmatch(text):
        suffix = (match[2] or "").lower()
        power = "kmgtpe".index(suffix) + 1 if suffix else 0
        return Quantity(_parse_number(match[1]) * 1024**power, is_size=True, text=text)
    raise AmountError(_quantity_problem(text))


def read_quantity(raw: object) -> Quantity | AmountError:
    """Parse a value once, at the edge; the user of the result decides about errors."""
    try:
        return parse_quantity(raw)
    except AmountError as error:
        return error


def _parse_number(text: str) -> int | Fraction:
    return int(text) if text.isdecimal() else Fraction(text)


def _quantity_text(raw: object) -> str:
    if isinstance(raw, bool):
        raise AmountError(f"{str(raw).lower()} is a boolean, not an amount")
    if isinstance(raw, float):
        text = str(getattr(raw, "text", repr(raw)))
    elif isinstance(raw, int):
        if raw < 0:
            raise AmountError(f"'{max(raw, -MAX_AMOUNT)}' is negative")
        text = str(raw) if raw <= MAX_AMOUNT else "9" * MAX_TEXT
    elif isinstance(raw, (str, Decimal)):
        text = str(raw)
    else:
        raise AmountError(f"expected a number or a string, got {_json_kind(raw)}")
    if _ZERO.fullmatch(text):
        return "0"
    if len(text) > MAX_TEXT:
        raise AmountError(f"longer than {MAX_TEXT} characters")
    return text


def _json_kind(raw: object) -> str:
    if raw is None:
        return "null"
    if isinstance(raw, Mapping):
        return "an object"
    return "a list" if isinstance(raw, (list, tuple)) else type(raw).__name__


def _quantity_problem(text: str) -> str:
    lowered = text.strip().lower()
    if lowered.lstrip("+-") in {"nan", "inf", "infinity"}:
        return f"{text!r} is not finite"
    if _EXPONENT.fullmatch(lowered):
        return f"{text!r} has an exponent; write it as a plain decimal"
    if lowered.startswith("-"):
        return f"{text!r} is negative"
    return f'invalid amount {text!r}: expected a decimal such as "0.5" or a size such as "512m"'


def parse_amount(raw: object, slot: SlotType) -> int:
    """Return the amount in base units of `slot`.

    Raises:
        AmountError: not an amount, or not a multiple of the slot's quantum; the message
            then names the two nearest multiples.
    """
    amount = parse_base_units(raw, slot.kind, slot.quantum)
    if slot.kind is SlotKind.UNIQUE and amount not in (0, ONE):
        raise AmountError(f"{format_amount(amount, slot.kind)} of a unique slot, expected 1 or 0")
    if amount % slot.quantum:
        raise AmountError(_nearest_problem(amount, slot.quantum, slot.kind))
    return amount


def parse_base_units(raw: object, kind: SlotKind, quantum: int = 1) -> int:
    """Return the amount in base units of `kind`.

    `quantum` only appears in the error message, to name the nearest valid amounts.

    Raises:
        AmountError: not an amount, finer than the base unit, or too large.
    """
    quantity = parse_quantity(raw)
    if quantity.is_size and kind is not SlotKind.BYTES:
        raise AmountError(
            f"{quantity.text!r} is a size, expected a plain decimal for a counted slot"
        )
    exact = quantity.value if kind is SlotKind.BYTES else quantity.value * ONE
    if exact > MAX_AMOUNT:
        raise AmountError(f"exceeds the maximum of {format_amount(MAX_AMOUNT, kind)}")
    if exact.denominator != 1:
        raise AmountError(_nearest_problem(exact, quantum, kind))
    return int(exact)


def _nearest_problem(exact: int | Fraction, quantum: int, kind: SlotKind) -> str:
    below = int(exact // quantum) * quantum
    return (
        f"not a multiple of {format_amount(quantum, kind)}; the nearest amounts are"
        f" {format_amount(below, kind)} and {format_amount(below + quantum, kind)}"
    )


def format_amount(amount: int, kind: SlotKind) -> str:
    """Return base units as a plain decimal without trailing zeros; inverse of parsing."""
    if kind is SlotKind.BYTES:
        return str(amount)
    whole, fraction = divmod(abs(amount), ONE)
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole}" + (f".{fraction:06d}".rstrip("0") if fraction else "")


def readable_amount(amount: int, kind: SlotKind) -> str:
    """Return an amount for people: bytes in the largest binary unit, with four digits at most."""
    if kind is not SlotKind.BYTES or amount < KIB:
        return format_amount(amount, kind)
    power = min((amount.bit_length() - 1) // 10, len(_BINARY_UNITS))
    return f"{amount / KIB**power:.4g} {_BINARY_UNITS[power - 1]}"


def readable_amounts(kind: SlotKind, *amounts: int) -> list[str]:
    """Return amounts of one sentence for people; different amounts never read the same."""
    readable = [readable_amount(amount, kind) for amount in amounts]
    if len(set(readable)) == len(set(amounts)):
        return readable
    return [f"{amount} bytes" for amount in amounts]


class ResourceSlots(Mapping[SlotName, int]):
    """Amounts by slot, in base units; immutable, and a missing slot is zero.

    >>> total = ResourceSlots({"cpu": 2 * ONE, "mem": 1024}) + {"cpu": ONE, "cuda.device": ONE}
    >>> total["cpu"], total["cuda.device"], total["tpu.chip"]
    (3000000, 1000000, 0)
    >>> ResourceSlots({"cpu": 0}) == ResourceSlots()
    True
    """

    __slots__ = ("_amounts",)

    def __init__(self, amounts: Mapping[SlotName, int] = MappingProxyType({})) -> None:
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, int):
                raise TypeError(f"{name}: base units are whole numbers, not {amount!r}")
        self._amounts = {name: amounts[name] for name in sorted(amounts) if amounts[name]}

    def __getitem__(self, name: SlotName) -> int:
        return self._amounts.get(name, 0)

    def __iter__(self) -> Iterator[SlotName]:
        return iter(self._amounts)

    def __len__(self) -> int:
        return len(self._amounts)

    def __contains__(self, name: object) -> bool:
        return name in self._amounts

    def items(self) -> ItemsView[SlotName, int]:
        return self._amounts.items()

    def __add__(self, other: Mapping[SlotName, int]) -> ResourceSlots:
        amounts = dict(self._amounts)
        for name, amount in ResourceSlots(other).items():
            amounts[name] = self[name] + amount
        return ResourceSlots(amounts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._amounts == {name: amount for name, amount in other.items() if amount}

    def __hash__(self) -> int:
        return hash(tuple(self._amounts.items()))

    def __repr__(self) -> str:
        return f"ResourceSlots({self._amounts!r})"


class SlotReading(NamedTuple):
    """The parsed slots of a request; this node may know all of them."""

    slots: ResourceSlots
    problems: tuple[Problem, ...] = ()
    """Problems of amounts."""
    excluded: tuple[Problem, ...] = ()
    """Problems of slots that exclude each other."""
    late: Mapping[str, str] = MappingProxyType({})
    """Device names of requested slots whose plugin does not answer now, with the reason."""

    def accepted(self, others: Sequence[Problem] = ()) -> ResourceSlots:
        """Return the slots of a valid request.

        Raises:
            InvalidRequest: there are `others`, problems of the rest on this node; lists all.
            InvalidSlotAmount: amounts are invalid; lists all of them.
            InvalidSlotCombination: two slots exclude each other.
            PluginUnavailable: the plugin of a slot does not answer now.
        """
        if others:
            problems = [*self.problems, *self.excluded]
            raise InvalidRequest([*problems, *others], is_local=not problems)
        if self.problems:
            raise InvalidSlotAmount(self.problems)
        if self.excluded:
            raise InvalidSlotCombination(self.excluded)
        if self.late:
            first = min(self.late)
            raise PluginUnavailable(f"plugin {first} is {self.late[first]}")
        return self.slots


def read_slots(
    raw: Mapping[str, object],
    types: Mapping[SlotName, SlotType],
    *,
    unavailable: Mapping[str, str] = MappingProxyType({}),
    failed: Mapping[str, str] = MappingProxyType({}),
    absent: Mapping[str, str] = MappingProxyType({}),
) -> SlotReading:
    """Parse a request's slots: first whether this node can know them, then their amounts.

    An unknown slot with an invalid amount counts as not zero.

    `unavailable` holds device names whose plugin may answer later, with its state and the reason,
    `failed` those whose plugin failed, `absent` those without hardware on the node.

    Raises:
        UnsupportedResource: unknown slots without such a plugin are not zero.
    """
    amounts: dict[SlotName, int] = {}
    unknown: list[SlotName] = []
    late: dict[str, str] = {}
    problems: list[Problem] = []
    for name, value in raw.items():
        try:
            if name in types:
                amounts[name] = parse_amount(value, types[name])
            if parse_quantity(value).value:
                if (reason := unavailable.get(device_name_of(name))) is not None:
                    late[device_name_of(name)] = reason
                elif name not in types:
                    unknown.append(name)
        except AmountError as error:
            if name in types or device_name_of(name) in unavailable:
                problems.append(Problem(f"slots.{name}", str(error)))
            else:
                unknown.append(name)
    if unknown:
        names = {device_name_of(name) for name in unknown}
        reasons = {name: reason for name, reason in failed.items() if name in names}
        missing = {name: reason for name, reason in absent.items() if name in names}
        raise UnsupportedResource(unknown, types, reasons, absent=missing)
    slots = ResourceSlots(amounts)
    return SlotReading(slots, tuple(problems), tuple(_slot_conflicts(slots, types)), late)


def _slot_conflicts(slots: ResourceSlots, types: Mapping[SlotName, SlotType]) -> Iterator[Problem]:
    groups: dict[tuple[str, str], dict[SlotName, list[SlotName]]] = {}
    for name in slots:
        if group := types[name].exclusive_group:
            families = groups.setdefault((device_name_of(name), group), {})
            families.setdefault(types[name].family, []).append(name)
    for families in groups.values():
        if len(families) > 1:
            names = [name for members in families.values() for name in members]
            reason = f"{' and '.join(names)} exclude each other; request one of them"
            yield Problem("slots", reason)
