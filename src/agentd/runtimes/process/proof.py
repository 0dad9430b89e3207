"""Who a process kernel is, and which processes are its own.

What is written down is believed if it fits what lives. Where it is damaged or gone, the
keeper says whose it is: in its environment, which agentd gave it and no kernel can reach. It
counts only if it runs as this user, in this pid namespace: in a container of its own
anybody can be root, and call a program anything. A kernel's own environment is its own to
overwrite, and is asked last, of processes that no keeper looks after.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentd.core.plan import KernelPlan
from agentd.core.record import read_time
from agentd.host.processes import NOT_THERE, Proc, Stat, all_processes, read_env, read_stat

KEEPER = "AGENTD_KEEPER"
"""The variable of a keeper's environment that names its node; a kernel has AGENTD_NODE."""


@dataclass(frozen=True, slots=True)
class NodeMarks:
    """What tells this node's processes, of this boot, from all others."""

    node_id: str
    boot_id: str

    def of(self, kernel_id: str) -> dict[str, str]:
        """Return the part of a kernel's environment that names it."""
        return {"AGENTD_NODE": self.node_id, "AGENTD_KERNEL": kernel_id}

    def keeper_of(self, plan: KernelPlan) -> dict[str, str]:
        """Return the environment that a kernel's keeper is started with."""
        return {
            KEEPER: self.node_id,
            "AGENTD_KERNEL": plan.spec.kernel_id,
            "AGENTD_AGENT": plan.spec.agent_id,
            "AGENTD_DEVICES": plan.statement,
        }


@dataclass(frozen=True, slots=True)
class Identity:
    """A kernel's command, its keeper, and the boot they belong to."""

    leader: Proc
    keeper: Proc
    boot_id: str
    started_at: float

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Identity:
        """Read what the keeper wrote.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it did not write that.
        """
        return cls(
            Proc(int(raw["pid"]), int(raw["start_time"])),
            Proc(int(raw["keeper_pid"]), int(raw["keeper_start_time"])),
            str(raw["boot_id"]),
            read_time(raw["started_at"]),
        )


def kept_by(keeper: Proc, boot_id: str) -> Identity:
    """Return who a keeper's kernel is: what it started first, or itself if nothing is left."""
    everyone = list(all_processes())
    kept = _descendants([keeper.pid], everyone)
    mine = [stat for stat in everyone if stat.pid in kept]
    return Identity(_first(mine) if mine else keeper, keeper, boot_id, 0.0)


def keepers(node_id: str) -> dict[str, Proc]:
    """Return the keepers of a node's kernels that live, by kernel."""
    return _keepers_among(_everyone(), node_id)


def _everyone() -> list[tuple[Stat, Mapping[str, str]]]:
    return [(stat, read_env(stat.pid)) for stat in all_processes()]


def _keepers_among(
    everyone: Iterable[tuple[Stat, Mapping[str, str]]], node_id: str
) -> dict[str, Proc]:
    return {
        env.get("AGENTD_KERNEL", ""): Proc(stat.pid, stat.start_time)
        for stat, env in everyone
        if env.get(KEEPER) == node_id and _is_our_own(stat.pid)
    }


def _is_our_own(pid: int) -> bool:
    """Tell whether a process runs as this user, in this pid namespace."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid() and _is_in_our_namespace(pid)
    except NOT_THERE:
        return False


def members(identity: Identity, marks: Mapping[str, str], group: Collection[int]) -> list[Proc]:
    """Return the live processes of a kernel.

    Those are what its keeper looks after, what is in its cgroup, and the command's session. A
    session of that number may be somebody else's by now: where the command has ended, a
    process counts only if nobody keeps it and it carries `marks`.
    """
    everyone = list(all_processes())
    has_keeper = is_kept(identity, marks)
    kept = _descendants([identity.keeper.pid], everyone) if has_keeper else set()
    is_certain = identity.leader.is_alive()
    return [
        Proc(stat.pid, stat.start_time)
        for stat in everyone
        if stat.pid in kept
        or stat.pid in group
        or (
            stat.session == identity.leader.pid
            and (is_certain or (not has_keeper and marks.items() <= read_env(stat.pid).items()))
        )
    ]


def is_true(identity: Identity, marks: Mapping[str, str]) -> bool:
    """Tell whether somebody lives of an identity, and is who it says.

    A keeper knows its own. Without one the command is known by its pid and start time.
    """
    if not identity.keeper.is_alive():
        return identity.leader.is_alive()
    if not is_kept(identity, marks):
        return False
    leader = read_stat(identity.leader.pid)
    if leader is None or not identity.leader.is_alive() or leader.parent == identity.keeper.pid:
        return True
    return leader.pid in _descendants([identity.keeper.pid], all_processes())


def is_kept(identity: Identity, marks: Mapping[str, str]) -> bool:
    """Tell whether the keeper that was written down lives, and is the one of this kernel."""
    pid = identity.keeper.pid
    if not identity.keeper.is_alive():
        return False
    env = read_env(pid)
    if KEEPER in env:
        return (env[KEEPER], env.get("AGENTD_KERNEL")) == tuple(marks.values())
    try:
        return b"shim.py" in Path(f"/proc/{pid}/cmdline").read_bytes()  # of an older agentd
    except NOT_THERE:
        return False


def recovered(
    marks: Mapping[str, str], boot_id: str, group: Collection[int] = ()
) -> Identity | None:
    """Return the identity of a kernel without a keeper, from who is in its cgroup.

    Without that, from what processes say; those that a keeper looks after belong to its
    kernel, whatever they say.
    """
    if group:
        seen = [stat for pid in group if (stat := read_stat(pid))]
        leader = _first(seen) if seen else Proc(min(group), 0)  # it has moved on since
        return Identity(leader, leader, boot_id, 0.0)
    mine = [stat for stat, name in orphans(marks["AGENTD_NODE"]) if name == marks["AGENTD_KERNEL"]]
    if not mine:
        return None
    leader = _first(mine)
    return Identity(leader, leader, boot_id, 0.0)


def orphans(node_id: str) -> list[tuple[Stat, str]]:
    """Return the processes without a keeper that say they are a node's, each with its kernel."""
    everyone = _everyone()
    roots = [keeper.pid for keeper in _keepers_among(everyone, node_id).values()]
    kept = _descendants(roots, (stat for stat, _ in everyone))
    return [
        (stat, env.get("AGENTD_KERNEL", ""))
        for stat, env in everyone
        if stat.pid not in kept
        and env.get("AGENTD_NODE") == node_id
        and _is_in_our_namespace(stat.pid)
    ]


def _is_in_our_namespace(pid: int) -> bool:
    try:
        ours = Path("/proc/self/ns/pid").stat().st_ino
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino == ours
    except (*NOT_THERE, PermissionError):
        return False


def _first(mine: Iterable[Stat]) -> Proc:
    """Return the oldest that leads a session, or the oldest."""
    leader = min(mine, key=lambda stat: (stat.session != stat.pid, stat.start_time))
    return Proc(leader.pid, leader.start_time)


def _descendants(roots: Iterable[int], everyone: Iterable[Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in everyone:
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children.get(pending.pop(), ()):
            found.add(pid)
            pending.append(pid)
    return found
