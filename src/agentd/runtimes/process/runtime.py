"""Kernels as plain processes, for nodes without an engine and for development.

Each kernel has a bundle below the state folder (see `bundle`) and, where one can be made, a
cgroup. A shim (see `shim`) outlives the daemon and keeps the exit status. What a process must
prove to count as a kernel's is decided in `proof`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from agentd.core.container_edits import ContainerEdits
from agentd.core.kernel import KernelRef, KernelSpec, KernelState, is_kernel_id
from agentd.core.observation import Leftover, Listing, ObservedKernel, ObservedState
from agentd.core.plan import KernelPlan, kernel_name
from agentd.core.record import DAMAGE
from agentd.errors import (
    InvalidRequest,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.failpoints import reach
from agentd.host.cgroups import MEMORY, PIDS, Cgroup, Cgroups
from agentd.plugin_api import Features
from agentd.runtimes.process.bundle import LOG, Bundle, names_in
from agentd.runtimes.process.logs import read_log, unkept
from agentd.runtimes.process.proof import Proof
from agentd.runtimes.process.spawn import ProcessRules, failure, order_of, spawn
from agentd.services.interfaces import LogQuery, Progress, Support

TRASH = ".removed-"
"""How the name of a bundle begins that is on its way out."""
AGENT, DEVICES = "agent", "devices"
"""What stands on a kernel's cgroup: whose it is, and the second statement of its devices."""
LOG_THREADS = 4
REMOVE_TRIES = 10


class ProcessRuntime:
    """Runs commands under shims; see `agentd.services.interfaces.Runtime`."""

    name = "process"
    minimum_memory_bytes = 1

    def __init__(
        self,
        folder: Path,
        node_id: str,
        boot_id: str,
        rules: ProcessRules,
        cgroups: Cgroups | None,
    ) -> None:
        self._folder = folder
        self._node_id = node_id
        self._boot_id = boot_id
        self._rules = rules
        self._cgroups = cgroups
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[str] = asyncio.Queue()
        self._log_pool = ThreadPoolExecutor(LOG_THREADS, "logs")

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._log_pool.shutdown(wait=False, cancel_futures=True)

    def problems(self, spec: KernelSpec) -> Sequence[Problem]:
        account = self._rules.account_of(spec.agent_id)
        user = account.name if account else pwd.getpwuid(os.geteuid()).pw_name
        return list(_problems(spec, user, self._rules.pids_limit))

    async def support(self, spec: KernelSpec) -> Support:
        controllers = self._cgroups.controllers if self._cgroups else frozenset[str]()
        missing = {
            "image": spec.image is not None,
            "mem": MEMORY not in controllers,
            "pids_limit": PIDS not in controllers,
            "separation": not self._rules.has_own(spec.agent_id),
            "statement": self._cgroups is None or not self._cgroups.keeps_attributes,
        }
        return Support(
            Features(self.name),
            frozenset(name for name, is_missing in missing.items() if is_missing),
        )

    async def create(self, plan: KernelPlan, progress: Progress) -> ObservedKernel:
        ref = KernelRef(plan.spec.kernel_id)
        bundle = self._bundle(ref.kernel_id)
        _refuse_what_needs_a_container(plan.edits)
        progress(KernelState.CREATING)
        if bundle.is_taken():
            raise KernelConflict(f"{bundle.path} is there, and no kernel of this node")
        try:
            return await self._started(plan, bundle)
        except BaseException as error:
            await self._undo(ref, error)
            if isinstance(error, OSError):
                what = f"{error.filename or bundle.path}: {error.strerror}"
                raise RuntimeFailure(what) from error
            raise

    async def _started(self, plan: KernelPlan, bundle: Bundle) -> ObservedKernel:
        with bundle.made(plan.record) as lock:
            await reach("create.after_record")
            cgroup = self._made_cgroup(plan)
            await reach("create.after_group")
            order = order_of(plan, bundle.path, self._boot_id, self._rules, cgroup)
            spawning = asyncio.create_task(asyncio.to_thread(spawn, order, lock))
            try:
                answer = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                await asyncio.wait([spawning])
                raise
        await reach("create.after_spawn")
        if "pid" not in answer:
            raise failure(plan, answer)
        self._watch(plan.spec.kernel_id)
        if (found := await self.find(KernelRef(plan.spec.kernel_id))) is None:
            raise RuntimeFailure(f"{bundle.path} was removed while its kernel was started")
        return found

    async def _undo(self, ref: KernelRef, error: BaseException) -> None:
        """Remove what a create left that failed.

        Raises:
            OutcomeUnknown: it cannot be removed.
        """
        try:
            await self.remove(ref)
        except (RuntimeUnavailable, RuntimeFailure) as left:
            raise OutcomeUnknown(f"{error}; and it cannot be undone: {left}") from error

    def _made_cgroup(self, plan: KernelPlan) -> Cgroup | None:
        if self._cgroups is None:
            return None
        cgroup = self._cgroups.group(plan.name)
        pids = plan.spec.container.pids_limit or self._rules.pids_limit
        attributes = {AGENT: plan.spec.agent_id, DEVICES: plan.statement}
        self._cgroups.create(cgroup, {MEMORY: plan.memory_bytes, PIDS: pids}, attributes)
        return cgroup

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        with looking():
            proof = self._proof(ref.kernel_id)
            if not proof.lives:
                return
            grace_s = self._rules.stop_timeout_s if timeout_s is None else timeout_s
            if grace_s > 0:
                proof.terminate()
                await reach("stop.after_term")
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await proof.all_ended()
            async for alive in proof.looks():
                await proof.kill(alive)
                await reach("stop.after_kill")

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        for _ in range(REMOVE_TRIES):
            if unless_alive:
                with looking():
                    if self._proof(ref.kernel_id).lives:
                        return False
            else:
                await self.stop(ref, 0)
            if await self._taken_away(ref.kernel_id):
                return True  # else its shim was faster than we were
        raise RuntimeFailure(f"kernel {ref.kernel_id} lives again, however often it is ended")

    async def _taken_away(self, kernel_id: str) -> bool:
        """Remove the bundle of a kernel that does not live; False if it began to."""
        with looking():
            bundle, trash = self._bundle(kernel_id), Bundle(self._folder / f"{TRASH}{kernel_id}")
            await self._clear(trash)
            try:
                bundle.path.rename(trash.path)
            except FileNotFoundError:
                await self._clear(trash)
                return True
            except OSError as error:
                raise RuntimeFailure(f"{bundle.path}: {error.strerror}") from None
            if Proof(trash, self._cgroup(kernel_id), self._boot_id).lives:
                trash.path.rename(bundle.path)
                return False
            await reach("delete.after_rename")
            await self._clear(trash)
            return True

    async def _clear(self, trash: Bundle) -> None:
        """Remove what is left of a kernel whose bundle was set aside."""
        if (cgroup := self._cgroup(trash.path.name.removeprefix(TRASH))) is not None:
            await cgroup.remove()
            await reach("delete.after_group")
        trash.remove()

    async def list(self) -> Listing:
        with looking():
            names = {name for name in names_in(self._folder) if is_kernel_id(name)}
            names |= self._grouped_kernels().keys()
            found = [self._observed(name) for name in sorted(names)]
            kernels = tuple(item for item in found if item is not None)
            return Listing(kernels, tuple(self._leftovers({item.kernel_id for item in kernels})))

    def _grouped_kernels(self) -> dict[str, Cgroup]:
        """Return the cgroups of this node's kernels, by kernel."""
        if self._cgroups is None:
            return {}
        prefix = kernel_name(self._node_id, "")
        names = (name for name in self._cgroups.names() if name.startswith(prefix))
        found = {name.removeprefix(prefix): self._cgroups.group(name) for name in names}
        return {name: group for name, group in found.items() if is_kernel_id(name)}

    def _leftovers(self, listed: set[str]) -> Iterator[Leftover]:
        for name in sorted(names_in(self._folder)):
            kernel_id = name.removeprefix(TRASH)
            if kernel_id not in listed:
                yield Leftover(kernel_id, f"folder {name}")
        for kernel_id in sorted(self._grouped_kernels().keys() - listed):
            yield Leftover(kernel_id, f"cgroup of kernel {kernel_id}")

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        with looking():
            return self._observed(ref.kernel_id)

    def _observed(self, kernel_id: str) -> ObservedKernel | None:
        """Return what there is of a kernel; None if it is not there, or none of this node's."""
        bundle, cgroup = self._bundle(kernel_id), self._cgroup(kernel_id)
        proof = Proof(bundle, cgroup, self._boot_id)
        is_bundle = bundle.exists()
        state, ending = proof.state()
        is_alive = state is ObservedState.RUNNING
        record = bundle.record() if is_bundle else ""
        if not self._is_own(kernel_id, record):
            if not proof.is_grouped:
                return None
            record = ""  # it lives in a cgroup of its own, so this is not its record
        if not (is_bundle or is_alive):
            return None
        return ObservedKernel(
            kernel_id=kernel_id,
            agent_id=cgroup.attribute(AGENT) if cgroup else "",
            runtime=self.name,
            handle=proof.handle(),
            state=state,
            record=record,
            statement=cgroup.attribute(DEVICES) if cgroup else "",
            started_at=proof.identity.started_at if proof.identity else None,
            ending=ending,
        )

    def _is_own(self, kernel_id: str, record: str) -> bool:
        """Tell whether a bundle's record does not name another kernel, as a copied one does.

        Without a record that can be read, it is own if nobody else's files are in the bundle.
        """
        try:
            raw = json.loads(record)
            return bool((raw["node_id"], raw["kernel_id"]) == (self._node_id, kernel_id))
        except DAMAGE:
            return not self._bundle(kernel_id).has_strangers()

    async def follow(self) -> AsyncIterator[str]:
        for name in names_in(self._folder):
            if name.startswith(TRASH):
                with looking():
                    await self._clear(Bundle(self._folder / name))
        for item in (await self.list()).kernels:
            if item.is_alive:
                self._watch(item.kernel_id)
        yield ""
        while True:
            yield await self._events.get()

    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncGenerator[bytes]:
        if problems := list(unkept(query)):
            raise InvalidRequest(problems)

        def is_running() -> bool:
            return query.follow and self._proof(ref.kernel_id).lives

        path = self._bundle(ref.kernel_id).path / LOG
        chunks = read_log(path, query.tail, is_running, self._log_pool)
        try:
            with looking():
                async for chunk in chunks:
                    yield chunk
        finally:
            await chunks.aclose()

    def _watch(self, kernel_id: str) -> None:
        if kernel_id not in self._watches:
            task = asyncio.create_task(self._wait_for_end(kernel_id))
            self._watches[kernel_id] = task
            task.add_done_callback(lambda _: self._watches.pop(kernel_id, None))

    async def _wait_for_end(self, kernel_id: str) -> None:
        with suppress(OSError):  # whoever looks at it is told the same
            proof = self._proof(kernel_id)
            if proof.identity is not None:
                await proof.identity.shim.ended()
            await proof.all_ended()
        self._events.put_nowait(kernel_id)

    def _bundle(self, kernel_id: str) -> Bundle:
        if not is_kernel_id(kernel_id):
            raise RuntimeFailure(f"{kernel_id!r} cannot be the name of a kernel")
        return Bundle(self._folder / kernel_id)

    def _cgroup(self, kernel_id: str) -> Cgroup | None:
        if self._cgroups is None:
            return None
        return self._cgroups.group(kernel_name(self._node_id, kernel_id))

    def _proof(self, kernel_id: str) -> Proof:
        return Proof(self._bundle(kernel_id), self._cgroup(kernel_id), self._boot_id)


@contextmanager
def looking() -> Iterator[None]:
    """What cannot be looked at, for want of a file descriptor or memory, proves nothing."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        why = f"processes and folders cannot be looked at: {what}{error.strerror}"
        raise RuntimeUnavailable(why) from error


def _refuse_what_needs_a_container(edits: ContainerEdits) -> None:
    moved = [mount for mount in edits.mounts if mount.source != mount.target]
    if moved or edits.cdi or edits.device_requests:
        raise RuntimeFailure(
            "its devices need files at other places or CDI, which plain processes do not have"
        )


def _problems(spec: KernelSpec, user: str, pids_limit: int) -> Iterator[Problem]:
    if not spec.command:
        yield Problem("command", "is empty; the process runtime runs a command")
    if spec.mounts:
        yield Problem("mounts", "the process runtime mounts nothing")
    if spec.ports:
        yield Problem("ports", "the process runtime forwards no ports")
    if (spec.container.pids_limit or 0) > pids_limit:
        why = f"{spec.container.pids_limit} are too many; allowed: up to {pids_limit}"
        yield Problem("pids_limit", why)
    needs_container = {
        "network": spec.container.network,
        "tmpfs": spec.container.tmpfs,
        "shm_size": spec.container.shm_size,
        "platform": spec.container.platform,
    }
    for member, value in needs_container.items():
        if value:
            yield Problem(member, "the process runtime has no containers")
    if spec.user not in (None, user):
        yield Problem("user", f"kernels of {spec.agent_id} run as {user} here")
