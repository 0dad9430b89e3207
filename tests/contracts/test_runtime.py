"""The contract of every runtime, including the fake."""

import asyncio
import grp
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from agentd.config.runtimes import DockerSettings, ProcessSettings, SystemdSettings
from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.devices import MEMORY, DeviceId
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.plan import KernelPlan, PlanContext, build_plan
from agentd.core.kernel.record import encode_device_label
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState, ObservedState
from agentd.core.kernel.usage import Usage, UsageReading
from agentd.core.slots import ONE, SlotKind
from agentd.errors import CommandNotFound, KernelConflict, RuntimeFailure, RuntimeUnavailable
from agentd.host.cgroups.hierarchies import MEMORY as MEMORY_CONTROLLER
from agentd.host.cgroups.hierarchies import PIDS, find_cgroups
from agentd.host.cgroups.usage import read_cgroups
from agentd.host.probe import probe
from agentd.host.systemd.availability import has_manager
from agentd.host.systemd.dbus import SystemdManager
from agentd.program.boot_id import boot_id
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.host.user_accounts import UserAccount, UserAccounts, find_account
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.runtimes.systemd.runtime import SystemdRuntime
from agentd.services.protocols import CreateUndone, LogQuery, Runtime
from support.daemon import UNITS
from support.engine import IMAGE
from support.fakes import FakeRuntime
from support.logs import read_log
from support.waiting import until

CORE = str(min(probe().cores))
SHARES = Allocation(
    (
        Share(DeviceId("cpu", CORE), f"cpu-{CORE}", "cpu", SlotKind.COUNT, ONE),
        Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, 64 * 2**20),
    )
)

K1 = KernelRef("k1")
NODE, OTHER = f"node-a-{os.getpid()}", f"node-b-{os.getpid()}"
"""Nodes of this worker's own: shims, units and cgroups are found by it, and so are leftovers."""


def plan(*command: str, kernel_id: str = "k1", node: str = NODE, **spec: Any) -> KernelPlan:
    given = KernelSpec(kernel_id, "agent-1", command, "hash", image=IMAGE, **spec)
    facts = PlanContext(node, (CORE,), frozenset({CORE}))
    kernel = Kernel(
        kernel_id, "agent-1", KernelState.PREPARING, "hash", 1.0, "any", {"cpu": "1"}, SHARES
    )
    return build_plan(given, kernel, ContainerEdits(env={"GPUS": "none"}), facts)


def process_runtime(
    folder: Path,
    node: str = NODE,
    boot: str | None = None,
    own: Mapping[str, UserAccount] = MappingProxyType({}),
    **settings: Any,
) -> ProcessRuntime:
    default = find_account("nobody") if os.geteuid() == 0 else None
    read = ProcessSettings.model_validate(settings, by_name=True)
    accounts = UserAccounts(default, own, is_unprivileged=os.geteuid() != 0)
    manager = SystemdManager(is_user=os.geteuid() != 0) if has_manager() else None
    return ProcessRuntime(
        folder,
        node,
        boot or boot_id(),
        settings=read,
        accounts=accounts,
        cgroups=find_cgroups(),
        manager=manager,
    )


OPERATORS: dict[str, Any] = {"allowed_groups": ["daemon", 44], "default_ulimits": {"nofile": 500}}
"""The operator's groups (44 is video in Debian) and limits, on each runtime."""


def docker_settings(socket: Path) -> DockerSettings:
    given = {"socket": socket, "network": "none", "stop_timeout": 5, **OPERATORS}
    return DockerSettings.model_validate(given, by_name=True)


@dataclass
class Rig:
    runtime: Runtime
    other_node: Runtime

    @property
    def counts(self) -> bool:
        """Whether this machine counts what its kernels use."""
        return self.runtime.name != "process" or find_cgroups() is not None

    async def create(self, *command: str, **options: Any) -> ObservedKernel:
        self.progress: list[KernelState] = []
        return await self.runtime.create(plan(*command, **options), self.progress.append)

    async def until_ended(self, kernel_id: str) -> ObservedKernel:
        async with asyncio.timeout(20):
            async for seen in self.runtime.watch_events():
                if seen in ("", kernel_id):
                    found = await self.runtime.find(KernelRef(kernel_id))
                    if found is None or found.state is ObservedState.EXITED:
                        break
        assert found is not None
        return found


ENGINES = {"docker-20.10": "engine", "docker-26.1": "engine26"}


@pytest.fixture(
    params=[
        "fake", "process", *UNITS, *(pytest.param(n, marks=pytest.mark.docker) for n in ENGINES)
    ]
)  # fmt: skip
async def rig(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Rig]:
    runtimes: list[Runtime] = []
    for node in (NODE, OTHER):
        if request.param in ENGINES:
            engine = request.getfixturevalue(ENGINES[request.param])
            runtimes.append(DockerRuntime(node, docker_settings(engine.socket)))
        elif request.param == "process":
            kernels = folder / "kernels"
            kernels.mkdir(exist_ok=True)
            runtimes.append(process_runtime(kernels, node, **OPERATORS))
        elif request.param == "systemd":
            units = folder / "units"
            units.mkdir(exist_ok=True)
            accounts = UserAccounts(is_unprivileged=os.geteuid() != 0)
            settings = SystemdSettings.model_validate(OPERATORS, by_name=True)
            runtimes.append(SystemdRuntime(units, node, boot_id(), settings, accounts))
        else:
            runtimes.append(FakeRuntime())
    yield Rig(*runtimes)
    for runtime in runtimes:
        for found in (await runtime.list_kernels()).kernels:
            await runtime.remove(found.ref)
        await runtime.close()


@pytest.mark.needs("cgroups")
async def test_created_kernel_runs_and_reports_its_identity(rig: Rig) -> None:
    created = await rig.create("sleep", "1000")
    assert created.state is ObservedState.RUNNING
    assert rig.progress[-1] is KernelState.CREATING
    found = await rig.runtime.find(K1)
    assert found == created
    assert (found.kernel_id, found.handle) == ("k1", created.handle)
    assert found.record == plan("sleep", "1000").record
    assert found.device_label == encode_device_label(SHARES)
    assert [item.kernel_id for item in (await rig.runtime.list_kernels()).kernels] == ["k1"]


async def test_a_command_that_does_not_exist_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(CommandNotFound):
        await rig.create("no-such-command")
    assert await rig.runtime.find(K1) is None
    assert (await rig.runtime.list_kernels()).kernels == ()


async def test_an_empty_request_is_refused_before_anything(rig: Rig) -> None:
    assert await rig.runtime.validate_spec(KernelSpec("k1", "agent-1", (), "hash"))


async def test_the_exit_code_is_kept(rig: Rig) -> None:
    await rig.create("sh", "-c", "exit 3")
    found = await rig.until_ended("k1")
    assert found.state is ObservedState.EXITED
    assert found.ending.exit_code == 3
    assert not found.ending.oom_killed
    assert found.ending.finished_at is not None


async def test_a_stopped_kernel_stays_listed(rig: Rig) -> None:
    created = await rig.create("sleep", "1000")
    await rig.runtime.stop(created.ref, 0)
    found = await rig.runtime.find(K1)
    assert found is not None
    assert found.state is ObservedState.EXITED
    assert found.ending.exit_code == 137


async def test_stop_of_an_ended_or_missing_kernel_succeeds(rig: Rig) -> None:
    created = await rig.create("sleep", "1000")
    for _ in range(2):
        await rig.runtime.stop(created.ref, 0)
    await rig.runtime.remove(created.ref)
    await rig.runtime.stop(created.ref, 0)


async def test_a_signal_reaches_the_first_process_alone(rig: Rig) -> None:
    if isinstance(rig.runtime, FakeRuntime):
        created = await rig.create("sleep", "1000")
    else:
        traps = 'for s in INT TERM HUP QUIT USR1 USR2; do trap "echo $s" $s; done'
        child = "sh -c 'trap \"echo child\" USR1; echo ready; while :; do sleep 0.1; done'"
        created = await rig.create("sh", "-c", f"{traps}; {child} & while :; do sleep 0.1; done")
        said = b"ready\n"
        await says(rig, said)
        for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
            assert await rig.runtime.signal(created.ref, signal.Signals[f"SIG{name}"])
            said += f"{name}\n".encode()
            await says(rig, said)
    while await rig.runtime.signal(created.ref, signal.SIGKILL):
        await asyncio.sleep(0.02)
    await rig.runtime.stop(created.ref, 0)  # its child may have outlived it
    assert (await rig.until_ended("k1")).ending.exit_code == 137
    for _ in range(2):
        assert not await rig.runtime.signal(created.ref, signal.SIGINT)
        await rig.runtime.remove(created.ref)


async def says(rig: Rig, text: bytes) -> None:
    """Wait until the kernel has printed this."""
    await until(lambda: read_log(rig.runtime, K1), (0, text), within_s=30)


async def test_remove_leaves_nothing_and_can_be_repeated(rig: Rig) -> None:
    created = await rig.create("sleep", "1000")
    for _ in range(2):
        await rig.runtime.remove(created.ref)
    assert await rig.runtime.find(K1) is None
    again = await rig.create("sleep", "1000")
    assert again.handle != created.handle


async def test_logs_are_given_byte_for_byte_and_by_the_last_lines(rig: Rig) -> None:
    created = await rig.create("sh", "-c", r"printf 'one\ntwo\n\377three\n'; exit 0")
    await rig.until_ended("k1")

    output = b"one\ntwo\n\xffthree\n"
    for follow in (False, True):
        for query, begin in (
            (LogQuery(follow), 0),
            (LogQuery(follow, tail=1), 8),
            (LogQuery(follow, tail=0), 15),
            (LogQuery(follow, tail=99), 0),
            *((LogQuery(follow, from_position=n), min(n, 15)) for n in (0, 1, 4, 9, 15, 99)),
        ):
            position, content = await read_log(rig.runtime, created.ref, query)
            assert (position, content) == (begin, output[begin:]), query


WORK = (
    "dd if=/dev/zero of=/dev/null bs=20971520 count=1 2>/dev/null;"
    " i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; times; sleep 1000 & wait"
)
"""Twenty MiB at once, some time on a core, which the shell tells, and then two processes."""


@pytest.mark.needs("cgroups")
async def test_usage_matches_the_kernels_own_report(rig: Rig) -> None:
    if isinstance(rig.runtime, FakeRuntime):
        rig.runtime.used["k1"] = UsageReading(Usage(processes=7))
        assert await rig.runtime.usages([as_known(await rig.create("sleep", "1000"))])
        return
    kernel = as_known(await rig.create("sh", "-c", WORK))
    said = b""
    async with asyncio.timeout(60):
        while said.count(b"s") < 4:
            said = (await read_log(rig.runtime, K1))[1]
    own_s, _, children_s, _ = (
        int(minutes) * 60 + float(seconds)
        for minutes, seconds in re.findall(r"(\d+)m([\d.]+)s", said.decode())
    )
    async with asyncio.timeout(10):
        while (found := (await rig.runtime.usages([kernel]))["k1"]).usage.processes != 2:
            await asyncio.sleep(0.01)
    usage = found.usage
    if rig.counts:
        assert (
            own_s + children_s <= (usage.cpu_seconds or 0) + 0.02 < 1.25 * (own_s + children_s) + 1
        )
        assert 20 << 20 <= (usage.memory_peak_bytes or 0) < 45 << 20
        assert 0 < (usage.memory_bytes or 0) < 45 << 20
        assert usage.memory_limit_bytes == 64 << 20
        assert read_cgroups(os.getpid()).isdisjoint(found.groups)
        assert found.groups
    await rig.runtime.stop(K1, 0)
    ended = replace(kernel, state=KernelState.TERMINATED)
    after = (await rig.runtime.usages([ended])).get("k1", UsageReading()).usage
    assert (after.cpu_seconds is None) == (rig.runtime.name == "docker" or not rig.counts)
    assert (after.cpu_seconds or own_s) >= own_s


async def test_exec_shares_the_kernel_but_ends_by_itself(rig: Rig) -> None:
    script = "id -u; sleep 1000 & wait"
    kernel = as_known(await rig.create("sh", "-c", script, env={"MINE": "x"}))
    asked = ExecSpec(("sh", "-c", "id -u; echo $MINE; cat; exit 5"))
    if isinstance(rig.runtime, FakeRuntime):
        with pytest.raises(RuntimeUnavailable):
            await rig.runtime.start_exec(kernel, asked)
        return
    said = b""
    async with asyncio.timeout(30):
        while not said.endswith(b"\n"):
            said = (await read_log(rig.runtime, K1))[1]
    session = await rig.runtime.start_exec(kernel, asked)
    await session.write(b"in")
    await session.close_input()
    async with asyncio.timeout(30):
        printed = [item async for item in session.output()]
        assert b"".join(data for _, data in printed) == said + b"x\nin"
        assert await session.wait() == 5
    await session.close()
    with pytest.raises(CommandNotFound):
        await rig.runtime.start_exec(kernel, ExecSpec(("no-such-command",)))
    waiting = await rig.runtime.start_exec(kernel, ExecSpec(("sleep", "1000"), tty=True))
    await waiting.resize(80, 25)
    await waiting.close()
    assert (await rig.runtime.find(K1)).state is ObservedState.RUNNING
    await rig.runtime.stop(K1, 0)
    with pytest.raises((KernelConflict, RuntimeFailure)):
        await rig.runtime.start_exec(kernel, asked)


@pytest.mark.needs("root")
async def test_kernel_and_its_execs_have_groups_and_limits(rig: Rig) -> None:
    if isinstance(rig.runtime, FakeRuntime):
        return
    script = "echo $(id -G) $(ulimit -n)"
    groups = {"groups": ["daemon", 44]}
    made = plan("sh", "-c", f"{script}; sleep 1000 & wait", options=groups)
    assert await rig.runtime.validate_spec(made.spec) == []
    kernel = as_known(await rig.runtime.create(made, lambda *_: None))
    async with asyncio.timeout(30):
        while not (said := (await read_log(rig.runtime, K1))[1]):
            pass
    session = await rig.runtime.start_exec(kernel, ExecSpec(("sh", "-c", script)))
    assert b"".join([data async for _, data in session.output()]) == said
    await session.close()
    *ids, files = map(int, said.split())
    assert {grp.getgrnam("daemon").gr_gid, 44} <= set(ids)
    assert files == 500


@pytest.fixture(params=[(0o077, -500, -5), (0, 500, 5)], ids=["protected", "meek"])
def inheritance(request: pytest.FixtureRequest) -> Iterator[None]:
    """A daemon with a umask, an oom_score_adj and a niceness of its own."""
    umask, score, niceness = request.param
    score_file = Path("/proc/self/oom_score_adj")
    before = os.umask(umask), score_file.read_text(), os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):  # Linux lets only CAP_SYS_RESOURCE lower it
        score_file.write_text(str(score))
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    yield
    os.umask(before[0])
    score_file.write_text(before[1])
    os.setpriority(os.PRIO_PROCESS, 0, before[2])


@pytest.mark.needs("root")
async def test_kernel_and_its_execs_inherit_nothing(rig: Rig, inheritance: None) -> None:
    if rig.runtime.name not in ("process", "systemd"):  # containers are the engine's children
        return
    script = "echo $(umask) $(cat /proc/self/oom_score_adj) $(cut -d' ' -f19 /proc/self/stat)"
    kernel = as_known(await rig.create("sh", "-c", f"{script}; sleep 1000 & wait"))
    async with asyncio.timeout(30):
        while not (said := (await read_log(rig.runtime, K1))[1]):
            pass
    session = await rig.runtime.start_exec(kernel, ExecSpec(("sh", "-c", script)))
    assert b"".join([data async for _, data in session.output()]) == said == b"0022 0 0\n"
    await session.close()


def as_known(found: ObservedKernel) -> Kernel:
    """A kernel as agentd knows it, that was just started."""
    state = KernelState.RUNNING
    return Kernel("k1", "agent-1", state, "hash", 1.0, found.runtime, handle=found.handle)


async def test_follow_yields_the_connection_first(rig: Rig) -> None:
    events = rig.runtime.watch_events()
    assert await anext(events) == ""
    created = await rig.create("sleep", "1000")
    stopping = asyncio.create_task(rig.runtime.stop(created.ref, 0))
    async with asyncio.timeout(20):
        while await anext(events) != "k1":
            pass
    await stopping
    await events.aclose()


async def test_another_node_s_kernels_are_not_ours(rig: Rig) -> None:
    other = await rig.other_node.create(plan("sleep", "1000", node=OTHER), lambda _: None)
    assert (await rig.runtime.list_kernels()).kernels == ()
    assert await rig.runtime.find(K1) is None
    assert [item.handle for item in (await rig.other_node.list_kernels()).kernels] == [other.handle]


async def test_two_kernels_at_once_do_not_meet(rig: Rig) -> None:
    names = [f"k{n}" for n in range(4)]
    await asyncio.gather(*(rig.create("sleep", "1000", kernel_id=name) for name in names))
    found = (await rig.runtime.list_kernels()).kernels
    assert sorted(item.kernel_id for item in found) == names
    assert len({item.handle for item in found}) == 4


def test_the_suite_knows_whether_limits_can_be_tried() -> None:
    if os.environ.get("AGENTD_REQUIRE_ALL"):
        cgroups = find_cgroups()
        assert cgroups is not None
        assert cgroups.controllers >= {MEMORY_CONTROLLER, PIDS}
        assert cgroups.keeps_attributes


async def test_a_cancelled_create_proves_what_is_left(rig: Rig) -> None:
    """`CreateUndone` proves that nothing is; at any moment of a create."""
    for moment in range(0, 40, 8):
        rig.progress = []
        create = asyncio.create_task(
            rig.runtime.create(
                plan("sleep", "1000"), lambda state, _=None: rig.progress.append(state)
            )
        )
        turns = moment
        while turns and not create.done():
            await asyncio.sleep(0)
            turns -= bool(rig.progress)
        create.cancel()
        try:
            await create
        except CreateUndone:
            assert await rig.runtime.find(K1) is None
        except asyncio.CancelledError:
            assert KernelState.CREATING not in rig.progress
        else:
            await rig.runtime.remove(K1)
