"""One process kernel: its folder, and its processes.

    record.json    the kernel's record, written before anything starts
    identity.json  pid, start time and boot id, written before the command runs
    exit.json      how it ended, written when nothing of it is left
    output.log     what it printed

Identity is pid, start time and boot id together (see `identity`); a bare pid is never
believed. Only an ending that can be read, or that nothing lives, says that a kernel has
ended. What cannot be looked at (no file descriptor, no memory) is raised as OSError, and
proves nothing. A folder that is not a kernel's is nobody's here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path

from agentd.core.kernel import Ending
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.core.record import DAMAGE, read_time
from agentd.host.cgroups import KernelGroup
from agentd.host.processes import Proc, children, read_env, strike
from agentd.runtimes.process.proof import (
    Identity,
    NodeMarks,
    is_kept,
    is_true,
    kept_by,
    members,
    recovered,
)

RECORD, IDENTITY, EXIT, OUTPUT = "record.json", "identity.json", "exit.json", "output.log"
_OURS = {RECORD, IDENTITY, EXIT, OUTPUT, "group"}  # an older agentd wrote `group`
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
_PAUSES_S = (0.0, 0.02, 0.05, 0.1)
"""How long after those of one look have ended the next one is taken."""
_KEEPER_ENDS_WITHIN_S = 0.02
_STRIKES = 200


class KernelFolder:
    """What is there of a kernel, at one look; `path` may have been set aside or be gone.

    `keepers` are all of the node's that live, asked only where the folder does not do.
    """

    def __init__(
        self,
        path: Path,
        kernel_id: str,
        node: NodeMarks,
        group: KernelGroup | None,
        keepers: Callable[[], Mapping[str, Proc]],
    ) -> None:
        self.path = path
        self.kernel_id = kernel_id
        self._node = node
        self._marks = node.of(kernel_id)
        self._group = group
        self._keepers = keepers

    @cached_property
    def _keeper(self) -> Proc | None:
        return self._keepers().get(self.kernel_id)

    @cached_property
    def living(self) -> Identity | None:
        """Who it is, as long as something of it lives; from those who live where need be."""
        if self._ending is not None:
            return None
        written, boot_id = self._written, self._node.boot_id
        is_now = written is not None and written.boot_id == boot_id
        if written is not None and is_now and is_true(written, self._marks):
            return written
        if self._keeper is not None:
            return kept_by(self._keeper, boot_id)
        if written is not None and not is_now:
            return None
        return recovered(self._marks, boot_id, self._grouped())

    @cached_property
    def _written(self) -> Identity | None:
        """Who it was, as the keeper wrote."""
        try:
            return Identity.from_json(json.loads(read_text(self.path / IDENTITY) or ""))
        except DAMAGE:
            return None

    def members(self) -> Sequence[Proc]:
        """Return its live processes."""
        if self.living is None:
            return ()
        return members(self.living, self._marks, self._grouped())

    async def all_ended(self) -> None:
        """Wait until it has no live process."""
        async for _ in self.looks():
            pass

    async def looks(self) -> AsyncIterator[Sequence[Proc]]:
        """Yield its live processes, and again when those have ended, until nothing is left.

        A kernel that forks and exits without pause has others at every look, or seems to have
        none. The looks come at growing distances, which leave the daemon to everybody else.
        """
        if self.living is None:
            return
        keeper = self.living.keeper
        for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            alive = self.members()
            if not (alive or self._grouped() or keeper.is_alive()):
                return
            yield alive
            for process in alive:
                await process.ended()
            if keeper.is_alive():
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s + _KEEPER_ENDS_WITHIN_S):
                        await keeper.ended()
            else:
                await asyncio.sleep(pause_s)

    async def kill(self, alive: Sequence[Proc]) -> None:
        """Kill those, and whom they start meanwhile, a few at a time."""
        for process in alive:
            process.signal(signal.SIGKILL)
            await asyncio.sleep(0)
        struck: set[int] = set()
        for _ in range(_STRIKES):
            if not strike(self._at_hand, struck):
                return
            await asyncio.sleep(0)

    def _at_hand(self) -> set[int]:
        """Return those of its processes that are told without a look at all of the machine's."""
        if self.living is None or not is_kept(self.living, self._marks):
            return self._grouped()
        return self._grouped() | children(self.living.keeper.pid)

    def _grouped(self) -> set[int]:
        return self._group.members() if self._group else set()

    def terminate(self) -> None:
        """Ask the command's process group to end, or what is left if the command has ended."""
        alive = self.members()
        if self.living is not None and self.living.leader in alive:
            with suppress(ProcessLookupError):
                os.killpg(self.living.leader.pid, signal.SIGTERM)
        else:
            for process in alive:
                process.signal(signal.SIGTERM)

    def found(self) -> FoundKernel | None:
        """Return what there is; None if it is not there, or not a kernel of this node."""
        record = read_text(self.path / RECORD) or ""
        if not self._is_ours(record):
            return None
        if not self.path.is_dir() and self.living is None:
            return None
        state, ending = self._state()
        who = self.living or self._written
        agent_id, statement = self._said()
        return FoundKernel(
            kernel_id=self.kernel_id,
            agent_id=agent_id,
            runtime="process",
            handle=str(who.leader.pid) if who else "",
            state=state,
            record=record,
            statement=statement,
            started_at=who.started_at if who else None,
            ending=ending,
        )

    def _is_ours(self, record: str) -> bool:
        """Tell whether this is a kernel of this node, and not a copy or a stranger's folder."""
        try:
            raw = json.loads(record)
            is_ours = (raw["node_id"], raw["kernel_id"]) == (self._node.node_id, self.kernel_id)
        except DAMAGE:
            is_ours = not (names_in(self.path) - _OURS)
        return (is_ours and not self.path.is_symlink()) or self._keeper is not None

    def _said(self) -> tuple[str, str]:
        """Return its agent and the second statement of its devices, for as long as it lives."""
        for process in (self.living.keeper, self.living.leader) if self.living else ():
            env = read_env(process.pid)
            if env.get("AGENTD_KERNEL") == self.kernel_id and "AGENTD_DEVICES" in env:
                return env.get("AGENTD_AGENT", ""), env["AGENTD_DEVICES"]
        return "", ""

    def _state(self) -> tuple[FoundState, Ending]:
        if self._ending is not None:
            return FoundState.EXITED, self._ending
        if self.living is not None and self._is_running(self.living):
            return FoundState.RUNNING, Ending()
        if (ending := self._read_ending()) is not None:  # written between the two looks
            return FoundState.EXITED, ending
        if not (self.path / IDENTITY).exists():
            return FoundState.CREATED, Ending()
        if self._written is None:
            why = "who it was cannot be read, and it is gone"
        elif self._written.boot_id != self._node.boot_id:
            why = "the node restarted; its exit status is lost"
        else:
            why = "its keeper left none; its exit status is lost"
        return FoundState.EXITED, Ending(reason=why)

    def _is_running(self, living: Identity) -> bool:
        return bool(is_kept(living, self._marks) or self._grouped() or self.members())

    @cached_property
    def _ending(self) -> Ending | None:
        return self._read_ending()

    def _read_ending(self) -> Ending | None:
        """Return how it ended; None if that is not written, or cannot be read."""
        try:
            raw = json.loads(read_text(self.path / EXIT) or "")
            finished_at = read_time(raw["finished_at"])
            return Ending(int(raw["exit_code"]), bool(raw["oom_killed"]), finished_at)
        except DAMAGE:
            return None


def clear(folder: Path) -> None:
    """Remove a folder and all in it, or the link that leads to one."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, what was being written apart; none if there is none."""
    try:
        return {path.name for path in folder.iterdir() if path.name[0] != "."}
    except (FileNotFoundError, NotADirectoryError):
        return set()


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
