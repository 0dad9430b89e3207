"""One process kernel: its folder, and its processes.

    record.json    the kernel's record, written before anything starts
    identity.json  pid, start time and boot id, written before the command runs
    exit.json      how it ended, written when nothing of it is left
    output.log     what it printed
    group          the path of its cgroup, where it has one

Identity is pid, start time and boot id together; a bare pid is never believed. Where the
folder is damaged or gone, a kernel that runs is known by its processes, which carry its
name. What cannot be looked at (no file descriptor, no memory) is raised as OSError, and
proves nothing.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agentd.adapters.cgroups import KernelGroup
from agentd.adapters.proc import Identity, Proc, members, read_env, recovered
from agentd.core.kernel import Ending
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.core.record import read_time

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


@dataclass(frozen=True)
class NodeMarks:
    """What tells this node's processes, of this boot, from all others."""

    node_id: str
    boot_id: str

    def of(self, kernel_id: str) -> dict[str, str]:
        """Return the part of a kernel's environment that names it."""
        return {"AGENTD_NODE": self.node_id, "AGENTD_KERNEL": kernel_id}


class KernelFolder:
    """What is there of a kernel, at one look; `path` may have been set aside or be gone."""

    def __init__(self, path: Path, kernel_id: str, node: NodeMarks) -> None:
        self.path = path
        self.kernel_id = kernel_id
        self._node = node
        self._marks = node.of(kernel_id)

    @cached_property
    def identity(self) -> Identity | None:
        """Who it is, or was; from its processes where that cannot be read."""
        text = read_text(self.path / "identity.json")
        try:
            if text is not None:
                return Identity.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError):
            pass
        return recovered(self._marks, self._node.boot_id)

    def members(self) -> Sequence[Proc]:
        """Return its live processes."""
        if self.identity is None or self.identity.boot_id != self._node.boot_id:
            return ()
        return members(self.identity, self._marks)

    async def all_ended(self) -> None:
        """Wait until it has no live process."""
        while alive := self.members():
            for process in alive:
                await process.ended()

    def terminate(self) -> None:
        """Ask the command's process group to end, or what is left if the command has ended."""
        alive = self.members()
        if self.identity is not None and self.identity.leader in alive:
            with suppress(ProcessLookupError):
                os.killpg(self.identity.leader.pid, signal.SIGTERM)
        else:
            for process in alive:
                process.signal(signal.SIGTERM)

    def found(self) -> FoundKernel | None:
        """Return what there is; None if it is not there, or of another node."""
        record = read_text(self.path / "record.json") or ""
        is_folder = self.path.is_dir()
        if _node_of(record) not in (None, self._node.node_id) or not (is_folder or self.members()):
            return None
        state, ending = self._state()
        identity = self.identity
        env = read_env(identity.leader.pid) if identity and state is FoundState.RUNNING else {}
        if not self._marks.items() <= env.items():
            env = {}
        return FoundKernel(
            kernel_id=self.kernel_id,
            agent_id=env.get("AGENTD_AGENT", ""),
            runtime="process",
            handle=str(identity.leader.pid) if identity else "",
            state=state,
            record=record,
            statement=env.get("AGENTD_DEVICES", ""),
            started_at=identity.started_at if identity else None,
            ending=ending,
        )

    def _state(self) -> tuple[FoundState, Ending]:
        identity = self.identity
        if (text := read_text(self.path / "exit.json")) is not None:
            return FoundState.EXITED, _ending(text)
        if identity is None and not (self.path / "identity.json").exists():
            return FoundState.CREATED, Ending()
        if identity is None:
            return FoundState.EXITED, Ending(reason="who it was cannot be read, and it is gone")
        if identity.boot_id != self._node.boot_id:
            return FoundState.EXITED, Ending(reason="the node restarted; its exit status is lost")
        if identity.keeper.is_alive() or self.members():
            return FoundState.RUNNING, Ending()
        text = read_text(self.path / "exit.json")  # written between the two looks
        lost = Ending(reason="its keeper left none; its exit status is lost")
        return FoundState.EXITED, lost if text is None else _ending(text)


def group_of(folder: Path) -> KernelGroup | None:
    """Return the cgroup of a kernel with this folder, if it has one."""
    text = read_text(folder / "group")
    return KernelGroup(Path(text)) if text else None


def read_text(path: Path) -> str | None:
    """Return a file's text, empty if it cannot be read; None if there is no such file.

    Raises:
        OSError: that cannot be told now.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return ""


def _ending(text: str) -> Ending:
    try:
        raw = json.loads(text)
        finished_at = read_time(raw["finished_at"])
        return Ending(int(raw["exit_code"]), bool(raw["oom_killed"]), finished_at)
    except (ValueError, KeyError, TypeError) as error:
        return Ending(reason=f"its exit status cannot be read: {error}")


def _node_of(record: str) -> str | None:
    """Return the node id a record carries; None if it cannot be read."""
    try:
        return str(json.loads(record)["node_id"])
    except (ValueError, KeyError, TypeError):
        return None
