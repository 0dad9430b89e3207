"""The record and the device label of a kernel, both kept on the kernel itself.

The record is JSON with a schema number. The device label repeats the devices as plain text, so that
a damaged record does not lose them:

    cuda/cuda0/cuda.device=1@GPU-5f2c cpu/3/cpu=1@cpu-3

Both have one entry for each slot of a device, the primary one first:

    cuda/cuda0/cuda.shares=0.5@GPU-5f2c cuda/cuda0/cuda.mem=42949672960B@GPU-5f2c

A reader accepts its own schema and older ones and ignores members that it does not know. Records
of kernels and claims have the same schemas. Since schema 2 a record has a `sum` of its other
members, so that a damaged one is never taken for another record, of any schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import UNREADABLE_SLOT, Allocation, Share, SlotAmount
from agentd.core.allocation.ports import Port
from agentd.core.devices import ID_PATTERN, DeviceId
from agentd.core.kernel.edits import Mount
from agentd.core.kernel.states import Kernel, KernelState
from agentd.core.names import is_name, quote_untrusted
from agentd.core.slots import AmountError, SlotKind, format_amount, is_slot_name, parse_base_units

SCHEMA = 2
DEVICE_LABEL = "statement"
"""Stands in `not_enforced` where the device label cannot be written."""
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
"""The errors of reading JSON of any shape into values of ours."""
LAST_SECOND = 253_402_300_799
"""The end of the year 9999, the last that can be shown."""
MAX_UID, MAX_PORT = 2**32 - 2, 2**16 - 1


class RecordError(ValueError):
    """A record or device label that cannot be read, and the reason."""


class MissingRecordError(RecordError):
    """There is no record."""


class ForeignRecordError(RecordError):
    """A record of another kernel."""


class NewerRecordError(RecordError):
    """A record of a schema that only a newer agentd knows."""


def encode(kernel: Kernel, node_id: str) -> str:
    """Return a kernel's record as one line of JSON; what changes while it runs is left out."""
    return seal(
        {
            "node_id": node_id,
            "runtime": kernel.runtime,
            "kernel_id": kernel.kernel_id,
            "agent_id": kernel.agent_id,
            "spec_hash": kernel.spec_hash,
            "created_at": kernel.created_at,
            "slots": dict(kernel.slots),
            "allocation": encode_allocation(kernel.allocation),
            "not_enforced": list(kernel.not_enforced),
            "ports": msgspec.to_builtins(list(kernel.ports)),
            "created_by": kernel.created_by,
            "image": kernel.image,
            "command": list(kernel.command),
            "env_names": list(kernel.env_names),
            "mounts": msgspec.to_builtins(list(kernel.mounts)),
            "labels": dict(kernel.labels),
            **({"claim_id": kernel.claim_id} if kernel.claim_id is not None else {}),
            **({"keep_claim": True} if kernel.keeps_claim else {}),
            **({"attempt": kernel.attempt} if kernel.attempt else {}),
            **({"remove": True} if kernel.removes else {}),
            **({"creator_uid": kernel.creator_uid} if kernel.creator_uid is not None else {}),
        }
    )


def seal(members: Mapping[str, object]) -> str:
    """Return a record of these members and their sum as one line of JSON.

    Its schema is this one, unless the members have one: files of the state folder do.
    """
    content = {"schema": SCHEMA, **members}
    return _write({**content, "sum": _sum_of(content)})


def _write(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _sum_of(content: Mapping[str, object]) -> str:
    return sha256(_write(content).encode()).hexdigest()[:16]


def encode_allocation(allocation: Allocation) -> list[dict[str, str]]:
    """Return an allocation as it stands in a record."""
    return [entry for share in allocation.shares for entry in _encode_share(share)]


def decode_allocation(raw: object) -> Allocation:
    """Read the allocation of a record; inverse of `encode_allocation`.

    Raises:
        RecordError: it is not a list, a share is malformed, or a slot of a device is there twice.
    """
    if not isinstance(raw, list):
        raise RecordError("invalid allocation: expected a list")
    return _group_entries(_decode_share(item) for item in raw)


def _decode_mount(raw: Mapping[str, object]) -> Mount:
    return Mount(
        _parse_text(raw["source"]), _parse_text(raw["target"]), raw["read_only"] is not False
    )


def _encode_share(share: Share) -> list[dict[str, str]]:
    return [
        {
            "device_name": share.device_id.name,
            "id": share.device_id.id,
            "stable_id": share.stable_id,
            "slot": slot,
            "kind": kind.value,
            "amount": format_amount(amount, kind),
        }
        for slot, kind, amount in share.amounts
    ]


def decode(text: str) -> Kernel:
    """Decode a record: the kernel as it was requested, `creating` and without a handle.

    Raises:
        RecordError: it is empty, damaged, of a newer schema, lacks a member, has one of another
            shape, or names a slot of a device twice.
    """
    if not text:
        raise MissingRecordError("it is missing")
    with malformed_as_record_error():
        raw = parse_members(text)
        _parse_name(raw["node_id"])
        return Kernel(
            kernel_id=_parse_name(raw["kernel_id"]),
            agent_id="" if raw["agent_id"] == "" else _parse_name(raw["agent_id"]),
            state=KernelState.CREATING,
            spec_hash=_parse_text(raw["spec_hash"]),
            created_at=parse_time(raw["created_at"]),
            runtime=_parse_text(raw["runtime"]),
            slots={_parse_text(name): _parse_text(amount) for name, amount in raw["slots"].items()},
            allocation=decode_allocation(raw["allocation"]),
            not_enforced=tuple(_parse_text(item) for item in raw["not_enforced"]),
            ports=tuple(_decode_port(item) for item in raw["ports"]),
            created_by=_parse_text(raw.get("created_by", "")),
            image=None if raw.get("image") is None else _parse_text(raw["image"]),
            command=tuple(_parse_text(word) for word in raw.get("command", ())),
            env_names=tuple(_parse_text(name) for name in raw.get("env_names", ())),
            mounts=tuple(_decode_mount(item) for item in raw.get("mounts", ())),
            labels={_parse_text(k): _parse_text(v) for k, v in raw.get("labels", {}).items()},
            claim_id=None if raw.get("claim_id") is None else _parse_name(raw["claim_id"]),
            keeps_claim=raw.get("keep_claim") is True,
            attempt=_parse_text(raw.get("attempt", "")),
            removes=raw.get("remove") is True,
            creator_uid=_parse_number(raw["creator_uid"], 0, MAX_UID)
            if "creator_uid" in raw
            else None,
        )


@contextmanager
def malformed_as_record_error() -> Iterator[None]:
    """Raise `RecordError` for JSON that lacks a member or has one of another shape."""
    try:
        yield
    except RecordError:
        raise
    except KeyError as error:
        raise RecordError(f"it has no {error.args[0]}") from None
    except MALFORMED as error:
        raise RecordError(str(error) or type(error).__name__) from None


def parse_members(text: str) -> dict[str, Any]:
    """Return the members of a record of a known schema.

    Raises:
        NewerRecordError: its schema is newer.
        RecordError: it is damaged, or has no schema number.
    """
    raw = read_members(text)
    schema = raw.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RecordError("it has no schema number")
    if schema > SCHEMA:
        raise NewerRecordError(f"its schema {schema} is newer than {SCHEMA}")
    return raw


def read_members(text: str) -> dict[str, Any]:
    """Return the members of a record of any schema, without its sum.

    Raises:
        RecordError: it is damaged: it is not JSON, or its sum is wrong.
    """
    with malformed_as_record_error():
        raw: dict[str, Any] = json.loads(text)
        if not isinstance(raw, dict):
            raise RecordError("expected an object of JSON")
        msgspec.json.encode(raw)  # no half of a character, and no number that cannot be shown
        if "sum" in raw or raw.get("schema") in range(2, SCHEMA + 1):
            given_sum = raw.pop("sum", None)
            if given_sum != _sum_of(raw):
                raise RecordError("it is damaged: its sum is not that of its content")
        return raw


def require_record(text: str | None) -> str:
    """Return the text of a record's file: None if there is no file, empty if it cannot be read.

    Raises:
        MissingRecordError: there is no file.
        RecordError: it is empty or cannot be read.
    """
    if text is None:
        raise MissingRecordError("it is missing")
    if not text:
        raise RecordError("its file is empty or cannot be read")
    return text


def require_owner(text: str, node_id: str, kernel_id: str) -> None:
    """Refuse the record of another kernel.

    Raises:
        ForeignRecordError: it is one.
        RecordError: that cannot be read.
    """
    with malformed_as_record_error():
        raw = read_members(text)
        node, kernel = raw["node_id"], raw["kernel_id"]
    if (node, kernel) != (node_id, kernel_id):
        node, kernel = (name if is_name(name) else quote_untrusted(name) for name in (node, kernel))
        raise ForeignRecordError(f"it is the record of kernel {kernel} of node {node}")


def is_of_other_node(text: str, node_id: str) -> bool:
    """Return whether a record can be read and is of another node."""
    with suppress(RecordError, KeyError):
        return bool(read_members(text)["node_id"] != node_id)
    return False


def _group_entries(entries: Iterable[Share]) -> Allocation:
    """Return an allocation of entries for one slot each; the first of a device is its primary slot.

    Raises:
        RecordError: a slot of a device is there twice, or beside a share of the whole device, which
            agentd never writes.
    """
    share_by_id: dict[str, Share] = {}
    for entry in entries:
        share = share_by_id.setdefault(entry.stable_id, entry)
        if share is entry:
            continue
        is_whole = UNREADABLE_SLOT in (share.slot, entry.slot)
        if share.device_id != entry.device_id or is_whole or entry.slot in share.slot_names:
            raise RecordError(f"duplicate device {entry.device_id} ({entry.stable_id})")
        secondary = SlotAmount(entry.slot, entry.kind, entry.amount)
        share_by_id[entry.stable_id] = replace(share, secondary=(*share.secondary, secondary))
    return Allocation(tuple(share_by_id.values()))


def _decode_share(raw: Mapping[str, object]) -> Share:
    kind = SlotKind(_parse_text(raw["kind"]))
    return _validate_share(
        Share(
            device_id=DeviceId(_parse_text(raw["device_name"]), _parse_text(raw["id"])),
            stable_id=_parse_text(raw["stable_id"]),
            slot=_parse_text(raw["slot"]),
            kind=kind,
            amount=parse_base_units(_parse_text(raw["amount"]), kind),
        )
    )


def _validate_share(share: Share) -> Share:
    """Return a share that can be held: some of a slot, or all of a device without saying of what.

    Raises:
        RecordError: its ids or its slot are malformed, or its amount is zero or negative.
    """
    for name in (*share.device_id, share.stable_id):
        if not ID_PATTERN.fullmatch(name):
            raise RecordError(f"invalid device id {quote_untrusted(name)}")
    is_whole = share.slot == UNREADABLE_SLOT and share.amount == 0
    if not is_whole and not is_slot_name(share.slot):
        raise RecordError(f"invalid slot {quote_untrusted(share.slot)}")
    if not is_whole and share.amount <= 0:
        amount = format_amount(share.amount, share.kind)
        raise RecordError(f"invalid amount of {share.device_id}: got {amount}, expected more")
    return share


def _decode_port(raw: Mapping[str, object]) -> Port:
    host = raw["host"]
    return Port(
        _parse_number(raw["container"], 1, MAX_PORT),
        None if host is None else _parse_number(host, 1, MAX_PORT),
        _parse_text(raw["protocol"]),
        _parse_text(raw["address"]),
    )


def _parse_number(raw: object, least: int, most: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= most:
        raise RecordError(f"invalid number {quote_untrusted(raw)}: expected {least} to {most}")
    return raw


def parse_time(raw: object) -> float:
    """Read seconds since the epoch, from 1970 to 9999.

    Raises:
        RecordError: it is something else.
    """
    if isinstance(raw, (int, float)) and 0 <= raw <= LAST_SECOND:
        return float(raw)
    raise RecordError(f"invalid time {quote_untrusted(raw)}: expected seconds since 1970")


def _parse_text(raw: object) -> str:
    if not isinstance(raw, str):
        raise RecordError(f"invalid text {quote_untrusted(raw)}: expected a string")
    return raw


def _parse_name(raw: object) -> str:
    if not is_name(raw):
        raise RecordError(f"invalid name {quote_untrusted(raw)}")
    return raw


def encode_device_label(allocation: Allocation) -> str:
    """Return the device label: `name/id/slot=amount@stable-id`, separated by blanks."""
    return " ".join(
        f"{share.device_id}/{slot}={format_amount(amount, kind)}"
        f"{'B' if kind is SlotKind.BYTES else ''}@{share.stable_id}"
        for share in allocation.shares
        for slot, kind, amount in share.amounts
    )


def decode_device_label(text: str) -> Allocation:
    """Decode a device label; inverse of `encode_device_label`.

    Raises:
        RecordError: a word of it is damaged, gives nothing of a slot, or is of a slot of a device
            that was named before.
    """
    return _group_entries(_parse_word(word) for word in text.split())


def _parse_word(word: str) -> Share:
    device_and_slot, _, amount_and_id = word.partition("=")
    amount, _, stable_id = amount_and_id.partition("@")
    parts = device_and_slot.split("/", 2)
    if len(parts) != 3 or not is_slot_name(parts[2]) or not ID_PATTERN.fullmatch(stable_id):  # noqa: PLR2004 - name, id, slot
        raise RecordError(
            f"invalid device label entry {word!r}: expected name/id/slot=amount@stable-id"
        )
    kind = SlotKind.BYTES if amount.endswith("B") else SlotKind.COUNT
    try:
        units = parse_base_units(amount.removesuffix("B"), kind)
    except AmountError as error:
        raise RecordError(f"{word!r}: {error}") from None
    return _validate_share(Share(DeviceId(parts[0], parts[1]), stable_id, parts[2], kind, units))
