"""Claims: devices that an engine takes from the ledger for work of its own.

A claim holds its devices as a kernel does, and runs nothing. It ends with its holder: a process, a
cgroup, a time limit, or nobody but the caller who names it. A create can take the devices of a
claim over. The claim then holds the rest of its allocation (`subtract_allocations`), so that no
order of changes charges a device twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agentd.core.access import Caller, Role
from agentd.core.allocation.ledger import UNREADABLE_SLOT, Allocation, Holder, Share
from agentd.core.devices import DeviceId
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.record import MAX_UID
from agentd.errors import ClaimConflict

MAX_CLAIMS = 4096
"""Maximum claims of a node; each agent may have an equal part of it."""
MIN_TTL_S, MAX_TTL_S = 1, 7 * 24 * 3600
MAX_PID, MAX_TICKS = 2**22, 2**63 - 1
"""The largest process id and start time of a process (proc(5))."""


class EditsTarget(StrEnum):
    """The target of the edits of a claim."""

    PROCESS = "process"
    CONTAINER = "container"


class EndReason(StrEnum):
    """Why a claim ended."""

    RELEASED = "released"
    PROCESS = "process"
    CGROUP = "cgroup"
    TIME = "time"
    REBOOT = "reboot"
    USED = "used"


class ProcessHolder(msgspec.Struct, frozen=True, tag="process"):
    """A process, by its id and its start time in ticks since the boot."""

    pid: Annotated[int, Meta(ge=1, le=MAX_PID)]
    start_time: Annotated[int, Meta(ge=0, le=MAX_TICKS)]


class CgroupHolder(msgspec.Struct, frozen=True, tag="cgroup"):
    """A cgroup of version 2, by its path and the inode of its folder."""

    cgroup: Annotated[str, Meta(pattern=r"\A/[^\0]*\Z")]
    inode: Annotated[int, Meta(ge=0)]


class TimeHolder(msgspec.Struct, frozen=True, tag="ttl"):
    """A time limit in seconds, to be renewed."""

    ttl: Annotated[int, Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]


class NameHolder(msgspec.Struct, frozen=True, tag="name"):
    """A name: only a caller ends the claim, or a reboot that it does not survive."""

    name: str
    survives_reboot: bool = False


ClaimHolder: TypeAlias = ProcessHolder | CgroupHolder | TimeHolder | NameHolder
"""The holder of a claim: its end ends the claim."""


class ClaimSpec(msgspec.Struct, frozen=True):
    """A claim request after it was read; `request_hash` is equal for equal requests.

    `slots`, `devices` and `is_discreet` are as in `KernelSpec`. `holder` is verified.
    """

    claim_id: str
    agent_id: str
    holder: ClaimHolder
    request_hash: str
    slots: Mapping[str, object] = {}
    devices: Mapping[str, tuple[str, ...]] = {}
    edits_for: EditsTarget = msgspec.field(default=EditsTarget.PROCESS, name="edits")
    labels: Mapping[str, str] = {}
    owner_uid: int | None = None
    is_observed: bool = msgspec.field(default=False, name="observed")
    created_by: str = ""
    is_discreet: bool = False


class Claim(msgspec.Struct, frozen=True):
    """One claim; `created_at` is in seconds since the epoch.

    `slots` are plain decimals as they were granted, `allocation` the devices of the whole claim,
    also those that its kernels hold. `boot_id` is the boot in which it was made. With an
    `unreadable_reason` its record cannot be read, and it holds every device.
    """

    claim_id: str
    agent_id: str
    holder: ClaimHolder
    request_hash: str
    created_at: float
    boot_id: str
    slots: Mapping[str, str] = {}
    allocation: Allocation = msgspec.field(default_factory=Allocation)
    edits_for: EditsTarget = EditsTarget.PROCESS
    edits: ContainerEdits = msgspec.field(default_factory=ContainerEdits)
    labels: Mapping[str, str] = {}
    created_by: str = ""
    owner_uid: Annotated[int, Meta(ge=0, le=MAX_UID)] | None = None
    is_observed: bool = False
    unreadable_reason: str = ""

    def is_ended_by_reboot(self, boot_id: str) -> bool:
        """Return whether a reboot has ended it, given the id of the current boot."""
        survives = isinstance(self.holder, NameHolder) and self.holder.survives_reboot
        return not (survives or self.unreadable_reason or self.boot_id == boot_id)

    def require_readable(self) -> None:
        """Refuse a claim whose id alone is known.

        Raises:
            ClaimConflict: its record cannot be read.
        """
        if self.unreadable_reason:
            raise ClaimConflict(f"claim {self.claim_id}: {self.unreadable_reason}")

    def may_be_used_by(self, caller: Caller) -> bool:
        """Return whether a caller may create from it, renew it, release it and use its kernels.

        The uid of a caller is that of its unix socket's peer. A gateway passes callers on, whose
        uid is not known.
        """
        if not caller.sees(self.agent_id):
            return False
        is_owner = caller.uid == self.owner_uid and not caller.via
        return self.owner_uid is None or is_owner or caller.role is Role.ADMIN


class ClaimStatus(msgspec.Struct, frozen=True):
    """A claim as it is now; `expires_at` is in seconds since the epoch, if it has a time limit."""

    claim: Claim
    is_used: bool = False
    expires_at: float | None = None

    @property
    def state(self) -> Literal["held", "used", "unreadable"]:
        """Its state."""
        if self.claim.unreadable_reason:
            return "unreadable"
        return "used" if self.is_used else "held"


class Collision(msgspec.Struct, frozen=True):
    """A device that an observed claim holds beside others, who hold more than there is together."""

    device_id: DeviceId
    holders: tuple[Holder, ...]


class EndedClaim(msgspec.Struct, frozen=True):
    """A claim that has ended, and why."""

    claim: Claim
    reason: EndReason


def subtract_allocations(allocation: Allocation, taken: Iterable[Allocation]) -> Allocation:
    """Return an allocation without the shares that others hold of the same devices.

    Each slot has its own rest. A device that is held whole of an unreadable record stays.
    """
    remaining_shares = {(share.stable_id, share.slot): share for share in allocation.shares}
    for share in (share for charged in taken for share in charged.shares):
        key = share.stable_id, share.slot
        if key in remaining_shares and share.slot != UNREADABLE_SLOT:
            remaining_shares[key] = _subtract_share(remaining_shares[key], share)
    return Allocation(
        tuple(
            remainder
            for remainder in remaining_shares.values()
            if remainder.slot == UNREADABLE_SLOT or any(entry.amount for entry in remainder.amounts)
        )
    )


def _subtract_share(share: Share, taken: Share) -> Share:
    amount = max(0, share.amount - taken.amount)
    usage = max(0, share.limit_usage - taken.limit_usage)
    return replace(
        share,
        amount=amount,
        secondary=tuple(
            entry._replace(amount=max(0, entry.amount - taken.amount_of(entry.slot)))
            for entry in share.secondary
        ),
        limit_excess=usage - amount,
    )


def merge_allocations(allocations: Iterable[Allocation]) -> Allocation:
    """Return several allocations as one, with one share of each device and primary slot."""
    share_by_key: dict[tuple[str, str], Share] = {}
    for allocation in allocations:
        for share in allocation.shares:
            key = share.stable_id, share.slot
            before = share_by_key.get(key)
            share_by_key[key] = _add_shares(before, share) if before else share
    return Allocation(tuple(share_by_key.values()))


def _add_shares(first: Share, second: Share) -> Share:
    merged = {entry.slot: entry for entry in first.secondary}
    for entry in second.secondary:
        before = merged[entry.slot].amount if entry.slot in merged else 0
        merged[entry.slot] = entry._replace(amount=before + entry.amount)
    return replace(
        second,
        amount=first.amount + second.amount,
        secondary=tuple(merged.values()),
        limit_excess=first.limit_excess + second.limit_excess,
    )


def total_amounts(shares: Iterable[Share]) -> dict[str, int]:
    """Return the amounts of shares together, in base units by slot."""
    totals = Allocation(tuple(shares)).totals()
    return {slot: entry.amount for slot, entry in totals.items()}
