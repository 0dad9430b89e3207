"""Claims and kernels as two teams were told that they have them, and the node on which they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentd.core.kernel.states import LIVE
from support.checked_node import units
from support.daemon import AGENTS, gpus

NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(6) + gpus(2, "shares", "tpu")
SHORT_TTL_S = 3
STRANGER = 4711
"""A user that nobody here is."""
SLOTS: tuple[dict[str, Any], ...] = (
    {"cuda.device": 1},
    {"cuda.device": 2},
    {"cuda.device": 3, "mem": "8m"},
    {"cuda.device": 1, "tpu.shares": "0.3"},
    {"tpu.shares": "0.7", "cpu": 1},
    {"mem": "64m"},
)
KERNEL = {"cpu": 0, "mem": "8m"}
Amounts = dict[tuple[str, str], int]
"""Base units by device and slot."""


def amounts_of(allocation: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Amounts:
    """Return the allocation of an answer by device and slot."""
    return {
        (f"{name}/{device}", slot): units(slot, amount)
        for name, by_slot in allocation.items()
        for slot, by_device in by_slot.items()
        for device, amount in by_device.items()
    }


@dataclass(frozen=True)
class Team:
    socket: str
    agent: str


TEAMS = (Team("a", "agent-1"), Team("b", "agent-2"))


@dataclass
class ModelClaim:
    """A claim that a team was told it has, or may have.

    `over_at` is when its time is over at the soonest. A call without an answer leaves a claim whose
    view `is_stale`, or that `may_be_gone`.
    """

    team: Team
    body: dict[str, Any]
    view: dict[str, Any] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None
    cgroup: Path | None = None
    over_at: float = float("inf")
    has_ended: bool = False
    is_stale: bool = False
    may_be_gone: bool = False

    @property
    def claim_id(self) -> str:
        return str(self.body["claim_id"])

    @property
    def path(self) -> str:
        return f"/v1/claims/{self.claim_id}"

    @property
    def is_steady(self) -> bool:
        """Whether nothing but a call ends it now."""
        return not self.has_ended and time.monotonic() < self.over_at

    @property
    def may_be_shared(self) -> bool:
        return "observed" in self.body

    @property
    def is_of_stranger(self) -> bool:
        return self.body.get("owner_uid") == STRANGER

    @property
    def shortest_ttl(self) -> float:
        """The least time that it may have after a start, in seconds."""
        ttl = self.view.get("holder", self.body["holder"]).get("ttl", float("inf"))
        return float(SHORT_TTL_S if self.is_stale and ttl < float("inf") else ttl)

    def restart_time(self, now: float) -> None:
        if (ttl := self.body["holder"].get("ttl")) is not None:
            self.over_at = now + ttl

    def end_holder(self) -> None:
        """End its process or cgroup, if it has one."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
        if self.cgroup is not None:
            with contextlib.suppress(FileNotFoundError):
                self.cgroup.rmdir()
        self.has_ended = self.has_ended or self.child is not None


@dataclass
class ModelKernel:
    team: Team
    body: dict[str, Any]
    view: dict[str, Any] = field(default_factory=dict)

    @property
    def kernel_id(self) -> str:
        return str(self.body["kernel_id"])

    @property
    def path(self) -> str:
        return f"/v1/kernels/{self.kernel_id}"

    @property
    def is_live(self) -> bool:
        return self.view.get("state") in LIVE

    @property
    def is_short(self) -> bool:
        """Whether it may have ended by itself."""
        return bool(self.body["command"] == ["true"])

    def uses(self, claim_id: str) -> bool:
        return self.is_live and self.body.get("claim") == claim_id


def recorded_amounts(record: dict[str, Any]) -> Amounts:
    """Return the allocation of a record in the same form."""
    return {
        (f"{s['device_name']}/{s['id']}", s["slot"]): units(s["slot"], s["amount"])
        for s in record["allocation"]
    }


def writable_cgroups() -> Path | None:
    """Return the mount of cgroup v2, None if no cgroup can be made there."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (root / "cgroup.controllers").exists() and os.geteuid() == 0:
            probe = root / f"agentd-probe-{os.getpid()}"
            with contextlib.suppress(OSError):
                probe.mkdir()
                probe.rmdir()
                return root
    return None
