"""Kernels as plain processes, for nodes without an engine and for development.

Each kernel has a folder below the state folder:

    record.json    the kernel's record, written before anything starts
    identity.json  pid, start time and boot id, written before the command runs
    exit.json      how it ended, written when nothing of it is left
    output.log     what it printed
    group          the path of its cgroup, where it has one

Identity is pid, start time and boot id together; a bare pid is never believed. A keeper
process (`shim`) outlives the daemon and keeps the exit status.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentd.adapters.cgroups import KernelGroup, MemoryGroups
from agentd.adapters.output import printed, unkept
from agentd.adapters.proc import Identity, Proc, members, read_env, recovered
from agentd.adapters.spawn import account, failure, spawn, with_groups
from agentd.core.edits import ContainerEdits
from agentd.core.kernel import Ending, KernelSpec, KernelState
from agentd.core.plan import KernelPlan
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.core.record import read_time
from agentd.errors import (
    InvalidRequest,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.plugin_api import Features
from agentd.services.interfaces import LogQuery, Progress

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STOP_TIMEOUT_S = 10.0


class ProcessRuntime:
    """Runs commands under keepers; see `agentd.services.interfaces.Runtime`."""

    name = "process"
    minimum_memory_bytes = 1

    def __init__(
        self, folder: Path, node_id: str, user: str, boot_id: str, groups: MemoryGroups | None
    ) -> None:
        self._folder = folder
        self._node_id = node_id
        self._boot_id = boot_id
        self._groups = groups
        self._account = account(user) if os.geteuid() == 0 else None
        self._user = user if self._account else pwd.getpwuid(os.geteuid()).pw_name
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[str] = asyncio.Queue()

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    def unenforced(self, spec: KernelSpec) -> frozenset[str]:
        missing = {"image": spec.image is not None, "mem": self._groups is None}
        return frozenset(name for name, is_missing in missing.items() if is_missing)

    async def features(self) -> Features:
        return Features(self.name)

    async def check(self, spec: KernelSpec) -> None:
        if problems := list(_problems(spec, self._user)):
            raise InvalidRequest(problems)

    async def create(self, plan: KernelPlan, progress: Progress) -> FoundKernel:
        kernel_id = plan.spec.kernel_id
        folder = self._folder / kernel_id
        _refuse_what_needs_a_container(plan.edits)
        progress(KernelState.CREATING)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise KernelConflict(f"{folder} is of a kernel that is not of this node") from None
        except OSError as error:
            raise RuntimeFailure(f"{folder}: {error.strerror}") from None
        try:
            (folder / "record.json").write_text(plan.record, encoding="utf-8")
            group = self._group(folder, plan)
        except OSError as error:
            await self.remove(kernel_id, "")
            raise RuntimeFailure(f"{error.filename or folder}: {error.strerror}") from None
        spawning = asyncio.create_task(asyncio.to_thread(spawn, self._order(folder, plan, group)))
        try:
            answer = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await asyncio.wait([spawning])
            await self.remove(kernel_id, "")
            raise
        if "pid" not in answer:
            await self.remove(kernel_id, "")
            raise failure(plan, answer)
        self._watch(kernel_id)
        if (found := await self.find(kernel_id)) is None:
            raise OutcomeUnknown(f"the folder of kernel {kernel_id} is gone")
        return found

    def _group(self, folder: Path, plan: KernelPlan) -> KernelGroup | None:
        if self._groups is None:
            return None
        group = self._groups.create(plan.name, plan.memory_bytes)
        (folder / "group").write_text(str(group.folder), encoding="utf-8")
        return group

    def _order(self, folder: Path, plan: KernelPlan, group: KernelGroup | None) -> dict[str, Any]:
        own = {
            **self._marks(plan.spec.kernel_id),
            "AGENTD_AGENT": plan.spec.agent_id,
            "AGENTD_DEVICES": plan.statement,
        }
        return {
            "folder": str(folder),
            "boot_id": self._boot_id,
            "command": list(plan.spec.command),
            "env": {"PATH": PATH, **plan.env, **own},
            "cpus": [int(core) for core in plan.cpus],
            "log": str(folder / "output.log"),
            "working_dir": plan.spec.working_dir or "/",
            "user": with_groups(self._account, plan.edits.groups),
            "cgroup_procs": str(group.procs) if group else "",
            "ulimits": {
                name: [limit.soft, limit.hard]
                for name, limit in plan.spec.container.ulimits.items()
            },
            "oom_file": str(group.oom_file) if group else "",
        }

    def _marks(self, kernel_id: str) -> dict[str, str]:
        return {"AGENTD_NODE": self._node_id, "AGENTD_KERNEL": kernel_id}

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        identity = self._identity(self._folder / kernel_id)
        if identity is None or identity.boot_id != self._boot_id:
            return
        grace_s = STOP_TIMEOUT_S if timeout_s is None else timeout_s
        if grace_s > 0:
            _terminate(identity, self._members(kernel_id, identity))
            try:
                async with asyncio.timeout(grace_s):
                    await self._all_ended(kernel_id, identity)
            except TimeoutError:
                pass
        while alive := self._members(kernel_id, identity):
            for process in alive:
                process.signal(signal.SIGKILL)
            for process in alive:
                await process.ended()
        await identity.keeper.ended()

    async def remove(self, kernel_id: str, handle: str) -> None:
        await self.stop(kernel_id, handle, 0)
        while not await self._taken_away(kernel_id):
            await self.stop(kernel_id, handle, 0)  # its keeper was faster than we were

    async def discard(self, kernel_id: str, handle: str) -> bool:
        found = await self.find(kernel_id)
        if found is not None and found.state is FoundState.RUNNING:
            return False
        return await self._taken_away(kernel_id)

    async def _taken_away(self, kernel_id: str) -> bool:
        """Remove the folder of a kernel that is not running; False if it began to run."""
        folder, trash = self._folder / kernel_id, self._folder / f".removed-{kernel_id}"
        shutil.rmtree(trash, ignore_errors=True)
        before = self._identity(folder)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return True
        except OSError as error:
            raise RuntimeFailure(f"{folder}: {error.strerror}") from None
        if before is None and self._identity(trash) is not None:
            trash.rename(folder)
            return False
        if (group := _read(trash / "group")) is not None:
            await KernelGroup(Path(group)).remove()
        shutil.rmtree(trash, ignore_errors=True)
        return True

    async def list(self) -> Sequence[FoundKernel]:
        try:
            folders = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        except OSError as error:
            raise RuntimeUnavailable(f"{self._folder}: {error.strerror}") from None
        found = [await self.find(folder.name) for folder in sorted(folders)]
        return [item for item in found if item is not None]

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        folder = self._folder / kernel_id
        if not folder.is_dir():
            return None
        record = _read(folder / "record.json") or ""
        if _node_of(record) not in (None, self._node_id):
            return None
        identity = self._identity(folder)
        state, ending = self._state(folder, identity)
        env = read_env(identity.leader.pid) if identity and state is FoundState.RUNNING else {}
        if not self._marks(kernel_id).items() <= env.items():
            env = {}
        return FoundKernel(
            kernel_id=kernel_id,
            agent_id=env.get("AGENTD_AGENT", ""),
            runtime=self.name,
            handle=str(identity.leader.pid) if identity else "",
            state=state,
            record=record,
            statement=env.get("AGENTD_DEVICES", ""),
            started_at=identity.started_at if identity else None,
            ending=ending,
        )

    def _state(self, folder: Path, identity: Identity | None) -> tuple[FoundState, Ending]:
        if identity is None and not (folder / "identity.json").exists():
            return FoundState.CREATED, Ending()
        if identity is None:
            return FoundState.EXITED, Ending(reason="who it was cannot be read, and it is gone")
        if (text := _read(folder / "exit.json")) is not None:
            return FoundState.EXITED, _ending(text)
        if identity.boot_id != self._boot_id:
            return FoundState.EXITED, Ending(reason="the node restarted; its exit status is lost")
        if identity.keeper.is_alive() or self._members(folder.name, identity):
            return FoundState.RUNNING, Ending()
        text = _read(folder / "exit.json")  # written between the two looks
        lost = Ending(reason="its keeper was killed; its exit status is lost")
        return FoundState.EXITED, lost if text is None else _ending(text)

    async def follow(self) -> AsyncIterator[str]:
        for trash in self._folder.glob(".removed-*"):
            shutil.rmtree(trash, ignore_errors=True)
        for item in await self.list():
            if item.state is FoundState.RUNNING:
                self._watch(item.kernel_id)
        yield ""
        while True:
            yield await self._events.get()

    async def logs(self, kernel_id: str, handle: str, query: LogQuery) -> AsyncIterator[bytes]:
        if problems := list(unkept(query)):
            raise InvalidRequest(problems)

        async def is_running() -> bool:
            found = await self.find(kernel_id) if query.follow else None
            return found is not None and found.state is FoundState.RUNNING

        output = self._folder / kernel_id / "output.log"
        async for chunk in printed(output, query.tail, is_running):
            yield chunk

    def _watch(self, kernel_id: str) -> None:
        if kernel_id not in self._watches:
            task = asyncio.create_task(self._wait_for_end(kernel_id))
            self._watches[kernel_id] = task
            task.add_done_callback(lambda _: self._watches.pop(kernel_id, None))

    async def _wait_for_end(self, kernel_id: str) -> None:
        if (identity := self._identity(self._folder / kernel_id)) is not None:
            await identity.keeper.ended()
            await self._all_ended(kernel_id, identity)
        self._events.put_nowait(kernel_id)

    async def _all_ended(self, kernel_id: str, identity: Identity) -> None:
        while alive := self._members(kernel_id, identity):
            for process in alive:
                await process.ended()

    def _members(self, kernel_id: str, identity: Identity) -> Sequence[Proc]:
        if identity.boot_id != self._boot_id:
            return ()
        return members(identity, self._marks(kernel_id))

    def _identity(self, folder: Path) -> Identity | None:
        text = _read(folder / "identity.json")
        try:
            if text is not None:
                return Identity.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError):
            pass
        return recovered(self._marks(folder.name.removeprefix(".removed-")), self._boot_id)


def _terminate(identity: Identity, alive: Sequence[Proc]) -> None:
    """Ask the command's process group to end, or what is left if the command has ended."""
    if identity.leader in alive:
        with suppress(ProcessLookupError):
            os.killpg(identity.leader.pid, signal.SIGTERM)
    else:
        for process in alive:
            process.signal(signal.SIGTERM)


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


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _refuse_what_needs_a_container(edits: ContainerEdits) -> None:
    moved = [mount for mount in edits.mounts if mount.source != mount.target]
    if moved or edits.cdi or edits.device_requests:
        raise RuntimeFailure(
            "its devices need files at other places or CDI, which plain processes do not have"
        )


def _problems(spec: KernelSpec, user: str) -> Iterator[Problem]:
    if not spec.command:
        yield Problem("command", "is empty; the process runtime runs a command")
    if spec.mounts:
        yield Problem("mounts", "the process runtime mounts nothing")
    if spec.ports:
        yield Problem("ports", "the process runtime forwards no ports")
    needs_container = {
        "network": spec.container.network,
        "tmpfs": spec.container.tmpfs,
        "shm_size": spec.container.shm_size,
        "pids_limit": spec.container.pids_limit,
        "platform": spec.container.platform,
    }
    for member, value in needs_container.items():
        if value:
            yield Problem(member, "the process runtime has no containers")
    if spec.user not in (None, user):
        yield Problem("user", f"kernels run as {user} here (runtime.process.user)")
