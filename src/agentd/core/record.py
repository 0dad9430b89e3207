"""What is written down about a kernel, where it survives everything: on the kernel.

The record is JSON with a schema number; the statement says the devices plainly a
second time, so that a damaged record does not lose them:

    cuda/cuda0/cuda.device=1@GPU-5f2c cpu/3/cpu=1@cpu-3

A reader accepts its own schema and older ones and ignores members that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agentd.core.allocation import Allocation, Share
from agentd.core.devices import ID_PATTERN, DeviceId, Inventory
from agentd.core.kernel import Port
from agentd.core.slots import AmountError, SlotKind, format_amount, is_slot_name, parse_base_units

SCHEMA = 1
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading JSON of any shape, into values of ours, can raise."""
LAST_SECOND = 253_402_300_799
"""The end of the year 9999, the last that can be shown."""


class RecordError(ValueError):
    """A record or statement that cannot be read, and why."""


class NewerRecordError(RecordError):
    """A record of a schema that only a newer agentd knows."""


@dataclass(frozen=True, slots=True)
class RecordedShare:
    """A share with the stable id of its device, whatever that is called today."""

    share: Share
    stable_id: str


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about a kernel that must outlive the daemon; times since the epoch."""

    kernel_id: str
    agent_id: str
    node_id: str
    spec_hash: str
    created_at: float
    slots: Mapping[str, str]
    shares: tuple[RecordedShare, ...]
    not_enforced: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()


def recorded_shares(allocation: Allocation, inventory: Inventory) -> tuple[RecordedShare, ...]:
    """Return an allocation's shares with the stable ids of their devices."""
    return tuple(
        RecordedShare(share, inventory.by_id[share.device_id].stable_id)
        for share in allocation.shares
    )


def encode(record: Record) -> str:
    """Return the record as one line of JSON."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "kernel_id": record.kernel_id,
            "agent_id": record.agent_id,
            "node_id": record.node_id,
            "spec_hash": record.spec_hash,
            "created_at": record.created_at,
            "slots": dict(record.slots),
            "allocation": [_encode_share(item) for item in record.shares],
            "not_enforced": list(record.not_enforced),
            "ports": [asdict(port) for port in record.ports],
        },
        separators=(",", ":"),
    )


def _encode_share(item: RecordedShare) -> dict[str, str]:
    share = item.share
    return {
        "device_name": share.device_id.name,
        "id": share.device_id.id,
        "stable_id": item.stable_id,
        "slot": share.slot,
        "kind": share.kind.value,
        "amount": format_amount(share.amount, share.kind),
    }


def decode(text: str) -> Record:
    """Read a record.

    Raises:
        RecordError: not JSON, a newer schema, or members missing or of another shape.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or not isinstance(raw.get("schema"), int):
            raise RecordError("it has no schema number")
        if raw["schema"] > SCHEMA:
            raise NewerRecordError(f"its schema {raw['schema']} is newer than {SCHEMA}")
        return Record(
            kernel_id=_text(raw["kernel_id"]),
            agent_id=_text(raw["agent_id"]),
            node_id=_text(raw["node_id"]),
            spec_hash=_text(raw["spec_hash"]),
            created_at=read_time(raw["created_at"]),
            slots={_text(name): _text(amount) for name, amount in raw["slots"].items()},
            shares=tuple(_decode_share(item) for item in raw["allocation"]),
            not_enforced=tuple(_text(item) for item in raw.get("not_enforced", ())),
            ports=tuple(_decode_port(item) for item in raw.get("ports", ())),
        )
    except RecordError:
        raise
    except KeyError as error:
        raise RecordError(f"it has no {error.args[0]}") from None
    except DAMAGE as error:
        raise RecordError(str(error) or type(error).__name__) from None


def _decode_share(raw: Mapping[str, object]) -> RecordedShare:
    kind = SlotKind(_text(raw["kind"]))
    device_id = DeviceId(_text(raw["device_name"]), _text(raw["id"]))
    amount = parse_base_units(_text(raw["amount"]), kind)
    share = Share(device_id, _text(raw["slot"]), kind, amount)
    return RecordedShare(share, _text(raw["stable_id"]))


def _decode_port(raw: Mapping[str, object]) -> Port:
    host = raw["host"]
    return Port(
        _number(raw["container"]),
        None if host is None else _number(host),
        _text(raw["protocol"]),
        _text(raw["address"]),
    )


def _number(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise RecordError(f"{raw!r} stands where a number belongs")
    return raw


def read_time(raw: object) -> float:
    """Read seconds since the epoch, from 1970 to 9999.

    Raises:
        RecordError: it is no such time.
    """
    if isinstance(raw, (int, float)) and 0 <= raw <= LAST_SECOND:
        return float(raw)
    raise RecordError(f"{raw!r} is no time")


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise RecordError(f"{raw!r} stands where text belongs")
    return raw


def statement(shares: tuple[RecordedShare, ...]) -> str:
    """Return the devices plainly: `name/id/slot=amount@stable-id`, separated by blanks."""
    return " ".join(
        f"{item.share.device_id}/{item.share.slot}"
        f"={format_amount(item.share.amount, item.share.kind)}"
        f"{'B' if item.share.kind is SlotKind.BYTES else ''}@{item.stable_id}"
        for item in shares
    )


def read_statement(text: str) -> tuple[RecordedShare, ...]:
    """Read a statement back.

    Raises:
        RecordError: a word of it is damaged.
    """
    return tuple(_read_word(word) for word in text.split())


def _read_word(word: str) -> RecordedShare:
    place, _, rest = word.partition("=")
    amount, _, stable_id = rest.partition("@")
    parts = place.split("/", 2)
    if len(parts) != 3 or not is_slot_name(parts[2]) or not ID_PATTERN.fullmatch(stable_id):  # noqa: PLR2004 - name, id, slot
        raise RecordError(f"{word!r} is no device statement")
    kind = SlotKind.BYTES if amount.endswith("B") else SlotKind.COUNT
    try:
        units = parse_base_units(amount.removesuffix("B"), kind)
    except AmountError as error:
        raise RecordError(f"{word!r}: {error}") from None
    return RecordedShare(Share(DeviceId(parts[0], parts[1]), parts[2], kind, units), stable_id)
