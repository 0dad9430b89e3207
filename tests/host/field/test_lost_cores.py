"""Cores that go away while agentd runs: one that is offline, a cpuset that shrinks."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, call

import pytest
from msgspec.structs import replace

from agentd.config.runtimes import ProcessSettings
from agentd.core.claim.claim import ClaimSpec, NameHolder
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import KernelRef, KernelState
from agentd.errors import CoresUnavailable, InsufficientResource, RuntimeFailure, RuntimeUnavailable
from agentd.runtimes.docker.docker_errors import DockerError
from agentd.runtimes.docker.error_translation import translate_error
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.process.spawn import start_error
from agentd.services import lost_cores
from contracts.test_runtime import CORE, NODE, docker_settings, plan, process_runtime
from services.node import Rig
from support.daemon import AGENTS, BASE, Daemon
from support.fakes import FakeRuntime
from support.waiting import until

NO_CORE = "1000"
HOST = '[host]\ncpus = 8\nmem = "8g"\n'


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    await made.relist()
    return made


def lose_in_runtime(runtime: FakeRuntime, *lost: str, are_named: bool = True) -> list[KernelPlan]:
    """Make creates on these cores fail; return their plans."""
    plans: list[KernelPlan] = []
    create = runtime.create

    async def create_elsewhere(wanted: KernelPlan, *rest):
        if {*lost} & {*wanted.cpus}:
            plans.append(wanted)
            named = sorted({*lost} & {*wanted.cpus}) if are_named else ()
            raise CoresUnavailable(named, "Invalid argument")
        return await create(wanted, *rest)

    runtime.create = create_elsewhere  # type: ignore[method-assign]
    return plans


def cores_of(rig: Rig, kernel_id: str) -> tuple[str, ...]:
    return rig.runtime.plans[-1].cpus if rig.runtime.plans[-1].spec.kernel_id == kernel_id else ()


async def test_unnamed_core_is_avoided_by_the_create_that_met_it(rig: Rig) -> None:
    """Such as with runc or crun, whose cpuset is smaller than that of agentd."""
    failed = lose_in_runtime(rig.runtime, "0", are_named=False)
    await rig.create("k1", cpu=2)
    assert ([attempt.cpus for attempt in failed], cores_of(rig, "k1")) == ([("0", "1")], ("2", "3"))
    assert [*rig.devices.conditions()] == [], "any of both may be the lost one"
    for cores in (0, 2):
        with pytest.raises(CoresUnavailable):
            await rig.create("k2", cpu=cores)
    await rig.create("k2", cpu=1)
    assert cores_of(rig, "k2") == ("1",)


async def test_missing_core_is_withheld_until_it_returns(rig: Rig) -> None:
    rig.available_cores = {1, 2, 3}
    await rig.create("k1", cpu=1)
    assert cores_of(rig, "k1") == ("1",)
    core = rig.devices.inventory.by_name["cpu"][0]
    assert core.withheld_reason == "it is offline, or outside of agentd's cpuset"
    assert [c.about for c in rig.devices.conditions()] == ["device/cpu/0"]
    rig.available_cores = {0, 1, 2, 3}
    rig.cores.scan()
    assert [*rig.devices.conditions()] == []
    await rig.create("k2", cpu=3)
    assert cores_of(rig, "k2") == ("0", "2", "3")


async def test_core_that_fails_is_withheld_and_another_is_tried(rig: Rig) -> None:
    failed = lose_in_runtime(rig.runtime, "0", "2")
    rig.state.subscribe(rig.node.counts.on_kernel_change)
    kernel = await rig.create("k1", cpu=1, cuda_device=1)
    assert [attempt.cpus for attempt in failed] == [("0",)]
    assert (cores_of(rig, "k1"), kernel.state) == (("1",), "running")
    assert rig.free_gpus == 1
    assert rig.node.counts.creates == {("a", "created"): 1}
    kernel, _ = await rig.service.create(rig.spec("k2", cpu=1), wait=False)
    await until(lambda: rig.states["k2"], "running")
    assert cores_of(rig, "k2") == ("3",)
    with pytest.raises(InsufficientResource):
        await rig.create("k3", cpu=9)
    with pytest.raises(RuntimeUnavailable, match="lost for now: 0, 2"):
        await rig.create("k3", cpu=1)
    with pytest.raises(RuntimeUnavailable, match="lost for now: 0, 2"):
        await rig.service.dry_run_create(rig.spec("k3", cpu=2))
    rig.now += lost_cores.RETRY_S
    with pytest.raises(CoresUnavailable):  # it is tried again
        await rig.create("k3", cpu=1)
    assert [attempt.cpus for attempt in failed[2:]] == [("0",), ("2",)]
    assert {*rig.states} == {"k1", "k2"}


async def test_kernel_without_cores_of_its_own_runs_on_the_others(rig: Rig) -> None:
    rig.available_cores = {2, 3}
    await rig.create("k1", cpu=0)
    assert cores_of(rig, "k1") == ("2", "3")
    rig.available_cores = set()
    with pytest.raises(RuntimeUnavailable, match="no core of agent a is there"):
        await rig.create("k2", cpu=0)
    assert rig.states == {"k1": "running"}


async def test_kernel_on_every_core_withholds_only_the_lost_one(rig: Rig) -> None:
    failed = lose_in_runtime(rig.runtime, "0")
    await rig.create("k1", cpu=0)
    assert cores_of(rig, "k1") == ("1", "2", "3")
    await rig.create("k2", cpu=3)
    assert cores_of(rig, "k2") == ("1", "2", "3")
    assert len(failed) == 1
    assert [c.about for c in rig.devices.conditions()] == ["device/cpu/0"]


@pytest.mark.parametrize("is_named", [True, False])
async def test_core_that_another_scan_missed_first_is_replaced(rig: Rig, is_named: bool) -> None:
    create = rig.runtime.create

    async def lose_first_core(wanted: KernelPlan, *rest):
        if "0" in wanted.cpus:
            rig.available_cores = {1, 2, 3}
            rig.cores.scan()
            raise CoresUnavailable(("0",) if is_named else (), "Invalid argument")
        return await create(wanted, *rest)

    rig.runtime.create = lose_first_core  # type: ignore[method-assign]
    await rig.create("k1", cpu=2)
    assert cores_of(rig, "k1") == ("1", "2")


async def test_time_of_a_create_on_other_cores_counts_once(rig: Rig) -> None:
    rig.state.subscribe(rig.node.counts.on_kernel_change)
    lose_in_runtime(rig.runtime, "0", "1")
    create = rig.runtime.create

    async def report(wanted: KernelPlan, on_progress, *rest):
        on_progress(KernelState.CREATING)
        return await create(wanted, on_progress, *rest)

    rig.runtime.create = report  # type: ignore[method-assign]
    for kernel_id in ("k1", "k1"):  # again with the same id
        await rig.create(kernel_id, cpu=1)
        await rig.service.remove(kernel_id, 0)
    counted = [d.cumulated()[0][-1] for d in rig.node.counts.durations.values()]
    assert counted == [("+Inf", 2)] * 2


async def test_create_tries_each_core_once_however_long_it_takes(rig: Rig) -> None:
    tried: list[str] = []

    async def fail_slowly(wanted: KernelPlan, *_: object):
        tried.extend(wanted.cpus)
        rig.now += lost_cores.RETRY_S / 3
        if len(tried) < 9:
            raise CoresUnavailable(wanted.cpus, "Invalid argument")

    rig.runtime.create = fail_slowly  # type: ignore[method-assign,assignment]
    with pytest.raises(CoresUnavailable):
        await rig.create("k1", cpu=1)
    assert tried == ["0", "1", "2", "3"]
    assert not rig.states


@pytest.mark.parametrize("cores", [(NO_CORE,), (CORE, NO_CORE)], ids=["none-is-there", "one-is"])
async def test_process_kernel_never_runs_on_fewer_cores(
    folder: Path, cores: tuple[str, ...]
) -> None:
    (folder / "kernels").mkdir()
    runtime = process_runtime(folder / "kernels")
    with pytest.raises(CoresUnavailable) as refusal:
        await runtime.create(replace(plan("true"), cpus=cores), lambda *_: None)
    assert refusal.value.cores == (NO_CORE,)
    assert await runtime.find(KernelRef("k1")) is None
    await runtime.close()


async def test_unit_of_a_shim_without_its_core_is_unloaded(folder: Path) -> None:
    """The next attempt, on other cores, has a unit of the same name."""
    (folder / "kernels").mkdir()
    runtime = process_runtime(folder / "kernels")
    await runtime.close()
    runtime._manager = manager = AsyncMock()
    answer = {"step": "cpus", "errno": errno.EINVAL, "cores": [3]}
    runtime._spawn_shim = AsyncMock(return_value=answer)  # type: ignore[method-assign]
    wanted = plan("true")
    for _ in range(2):
        with pytest.raises(CoresUnavailable):
            await runtime.create(wanted, lambda *_: None)
    unit = f"agentd-shim-{wanted.name.removeprefix('agentd-')}.service"
    assert manager.unload.await_args_list == [call(unit)] * 2


SHIM_ANSWERS = {
    "cores": ({"errno": errno.EINVAL, "cores": [3]}, CoresUnavailable),
    "not permitted": ({"errno": errno.EPERM, "cores": []}, RuntimeFailure),
    "filtered": ({"errno": errno.ENOSYS, "cores": []}, RuntimeFailure),
}


@pytest.mark.parametrize(("answer", "kind"), SHIM_ANSWERS.values(), ids=SHIM_ANSWERS)
def test_only_a_missing_core_is_lost(answer: dict[str, object], kind: type[Exception]) -> None:
    error = start_error(plan("true"), {"step": "cpus", **answer}, ProcessSettings())
    assert type(error) is kind
    assert getattr(error, "cores", ("3",)) == ("3",)


_FILE = "/sys/fs/cgroup/machine.slice/x/cpuset.cpus"
ENGINES = {
    "docker": (400, "Requested CPUs are not available - requested 3, available: 0-2"),
    "runc": (500, f"failed to write 3: write {_FILE}: numerical result out of range: unknown"),
    "crun": (500, f"crun: writing file `{_FILE}`: Invalid argument: OCI runtime error"),
}


NAMED = {"docker": ("3",), "runc": (), "crun": ()}


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_that_lacks_a_core_says_so(engine: str) -> None:
    for asked, lost in ((("3",), ("3",)), (("0", "1", "3"), NAMED[engine])):
        error = translate_error(
            DockerError(*ENGINES[engine]), replace(plan("find", "/", "/sys", "-x"), cpus=asked)
        )
        assert isinstance(error, CoresUnavailable)
        assert tuple(error.cores) == lost


@pytest.mark.docker
@pytest.mark.parametrize("name", ["engine", "engine26"])
async def test_real_engine_without_a_core(name: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(name)
    runtime = DockerRuntime(NODE, docker_settings(engine.socket))
    with pytest.raises(CoresUnavailable) as refusal:
        await runtime.create(replace(plan("true"), cpus=(CORE, NO_CORE)), lambda *_: None)
    assert refusal.value.cores == (NO_CORE,)
    assert await runtime.find(KernelRef("k1")) is None
    await runtime.close()


WORDS = {
    "command": f'exec: "write {_FILE}": not found',
    "mount": f'error mounting "/home/write {_FILE}" to rootfs',
    "repeated": f'exec: "x": stat write {_FILE}: no such file',
}


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS)
def test_words_of_a_request_withhold_no_core(text: str) -> None:
    error = translate_error(DockerError(500, text), plan("true"))
    assert not isinstance(error, CoresUnavailable)


@pytest.fixture
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    made = Daemon(folder, "process")
    made.configure(AGENTS, BASE.replace(HOST, ""))
    await made.start()
    yield made
    await made.close()


async def test_shrunken_affinity_refuses_for_the_moment(daemon: Daemon) -> None:
    assert daemon.process is not None
    pid, cores = daemon.process.pid, sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, cores[:1])
    every_core = {"cpu": len(cores)}
    refused = await daemon.create(kernel_id="k1", slots=every_core)
    assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
    states = {row["state"] for row in await daemon.get("/v1/devices") if row["id"] == str(cores[1])}
    assert states == {"withheld"}
    created = await daemon.running(kernel_id="k1", slots={"cpu": 1})
    assert [*created["allocation"]["cpu"]["cpu"]] == [str(cores[0])]
    assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
    os.sched_setaffinity(pid, cores)
    assert (await daemon.create(kernel_id="k1", slots=every_core)).status == 201
    assert not any("cpuset" in text for text in await daemon.warnings())


PINNED = """
import os, runpy
os.sched_setaffinity(0, {cores})
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
MANUAL = """
[resource]
allocation-mode = "manual"
reserved-cpu = 1
[[agents]]
id = "agent-1"
resource = {{ cpu = ["{core}"], mem = "1g" }}
"""


@pytest.mark.parametrize("missing", [0, 1], ids=["reserved-core", "agent-core"])
async def test_start_without_a_core_goes_on(folder: Path, missing: int) -> None:
    reserved, own = sorted(os.sched_getaffinity(0))[:2]
    present = {reserved, own} - {(reserved, own)[missing]}
    daemon = Daemon(folder, "process")
    daemon.configure(MANUAL.format(core=own), BASE.replace(HOST, ""))
    for cores in ({reserved, own}, present):
        daemon.program = ("-c", PINNED.format(cores=cores))
        await daemon.restart()
    agents = {row["id"]: row["agents"] for row in await daemon.get("/v1/devices")}
    assert (agents[str(reserved)], agents[str(own)]) == ([], ["agent-1"])
    conditions = (await daemon.get("/v1/node"))["conditions"]
    assert [c["about"] for c in conditions] == [f"device/cpu/{(reserved, own)[missing]}"]
    created = await daemon.create(slots={"cpu": 1})
    assert created.status == (409 if missing else 201)
    await daemon.close()


async def test_claimed_core_that_fails_leaves_the_others(rig: Rig) -> None:
    claim = ClaimSpec("c1", "a", NameHolder("x"), "c1", slots={"cpu": 2})
    await rig.claims.create(claim)
    failed = lose_in_runtime(rig.runtime, "0")
    spec = replace(rig.spec("k1", cpu=1), claim_id="c1")
    kernel, _ = await rig.service.create(spec)
    assert (cores_of(rig, "k1"), kernel.claim_id) == (("1",), "c1")
    assert len(failed) == 1
