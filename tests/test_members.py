"""Each member of a create does what it says on every runtime, or is refused there.

A new member needs a value in `OTHER`; these tests say what else is missing.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import asdict, replace

from agentd.cli.agentctl.create import create
from agentd.cli.agentctl.options import MemberOption
from agentd.cli.agentctl.run import run
from agentd.config.runtimes import DockerSettings, ProcessSettings, SystemdSettings
from agentd.core.claim.claim import ClaimSpec, TimeHolder
from agentd.core.kernel.options import unsupported_members
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import Kernel, KernelSpec
from agentd.errors import AgentdError, InvalidRequest
from agentd.host.cgroups.hierarchies import MEMORY, PIDS
from agentd.host.groups import with_group_ids
from agentd.host.lookups import Lookups
from agentd.rpc.requests import CreateKernelRequest
from agentd.runtimes.docker.container_config import CONTAINER_MEMBERS
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.host.environment import kernel_environment
from agentd.runtimes.host.request_limits import HOST_MEMBERS, host_options
from agentd.runtimes.host.user_accounts import UserAccount, UserAccounts
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.runtimes.process.spawn import shim_request
from agentd.runtimes.systemd.runtime import SystemdRuntime
from agentd.runtimes.systemd.unit import properties
from agentd.services.protocols import Runtime
from runtimes.docker.fake_engine import FakeEngine
from services.node import Rig

MEMBERS = CreateKernelRequest.model_fields
USUAL = {"kernel_id": "k1", "image": "usual:1", "command": ["sleep"], "slots": {"cuda.device": 1}}
OTHER: dict[str, Any] = {
    "kernel_id": "k2",
    "image": "other:1",
    "command": ["printf"],
    "env": {"A": "b"},
    "slots": {"cuda.device": 2},
    "devices": {"cuda": ["cuda1"]},
    "claim": "c1",
    "keep_claim": True,
    "overcommit": True,
    "mounts": [{"source": "/usr/lib", "target": "/data"}],
    "ports": [{"container": 80, "host": 8080}],
    "labels": {"team": "vision"},
    "working_dir": "/tmp",
    "user": "1000",
    "pull_policy": "always",
    "platform": "linux/arm64",
    "network": "other",
    "tmpfs": [{"target": "/scratch"}],
    "shm_size": "64m",
    "pids_limit": 9,
    "ulimits": {"nofile": 100},
    "init": True,
    "groups": [7],
    "entrypoint": [],
    "attempt": "00000000000000ff",
    "remove": True,
}
"""Another value than the usual one for each member."""
ACCOUNT = UserAccount("u", 1000, 1000, (1000,))
NOT_COMPARED = ("kernel_id", "attempt", "remove")
"""Members that do not make two requests differ."""
OF_AGENTD = ("slots", "devices", "claim", "keep_claim", "overcommit", "labels", *NOT_COMPARED)
"""Members that agentd carries out before it calls a runtime."""


WITHOUT_OPTION = {
    "command": "the argument COMMAND of every command",
    "keep_claim": "agentctl run sets it with --claim",
    "attempt": "the clients make one for each create",
    "remove": "agentctl run sets it with --rm",
}
"""Members that no option of `agentctl create` or `run` has, with the reason."""


def body(member: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the usual body and one in which a member has its other value."""
    usual = {**USUAL, "claim": "c1"} if member == "keep_claim" else USUAL
    return usual, {**usual, member: OTHER[member]}


def spec_of(content: dict[str, Any]) -> KernelSpec:
    return CreateKernelRequest.model_validate(content).to_spec("a")


async def planned(spec: KernelSpec) -> tuple[Kernel, KernelPlan]:
    """Return the kernel and the plan that a node makes of a request; claim `c1` has a GPU."""
    rig = Rig()
    await rig.relist()
    wanted = {"slots": spec_of({**USUAL, "slots": {"cuda.device": 1}}).slots}
    if spec.claim_id:
        await rig.claims.create(ClaimSpec("c1", "a", TimeHolder(60), "hash", **wanted))
    kernel, _ = await rig.service.create(spec)
    return kernel, rig.runtime.plans[0]


class Cgroups:
    """Cgroups of a host that has all controllers."""

    is_writable = True
    controllers = frozenset({MEMORY, PIDS})
    keeps_attributes = True

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    def group(self, name: str) -> Any:
        return SimpleNamespace(procs_files=[name], oom_file=name)

    def create(self, cgroup: object, limits: object, attributes: object) -> None:
        self._requests.append((limits, attributes))


class Host:
    """The runtimes of a host; what a create asks of engine, shim or systemd is written down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests: list[Any] = []
        self._engine = FakeEngine(folder / "engine.sock")
        self._engine.answer = self._answer
        settings = {"allowed_networks": ["other"], "allowed_mounts": ["/usr"], "network": "none"}
        settings |= {"socket": folder / "engine.sock", "allowed_groups": [7]}
        self._docker = DockerSettings.model_validate(settings, by_name=True)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/containers/create"):
            self._requests.append((dict(request.query), await request.text()))
            return web.json_response({"message": "no"}, status=500)
        if request.path.endswith("/images/create"):
            self._requests.append(dict(request.query))
            return web.Response(text='{"status": "Status: done"}\n')
        return web.json_response({})

    async def requests(self, name: str, plan: KernelPlan) -> list[Any]:
        """Return what a create asks for."""
        self._requests.clear()
        if name == "systemd":
            plan = await with_group_ids(
                plan, host_options(plan.spec).groups, [7], {plan.spec.agent_id: Lookups()}
            )
            units = properties(plan, "/f", SystemdSettings(), UserAccounts(), [])
            return [units, kernel_environment(plan)]
        runtime: Any = self.runtime(name)
        if name == "process":
            plan = await runtime._with_group_ids(plan)
            cgroup = runtime._create_cgroup(plan)
            request = shim_request(
                plan,
                folder=self._folder,
                boot_id="boot",
                settings=ProcessSettings(),
                account=ACCOUNT,
                cgroup=cgroup,
            )
            return [*self._requests, request]
        await self._engine.start()
        try:
            with pytest.raises(AgentdError):
                await runtime.create(plan, lambda *_: None)
        finally:
            await runtime.close()
            await self._engine.stop()
        return list(self._requests)

    def runtime(self, name: str) -> Runtime:
        factories: dict[str, Callable[[], Runtime]] = {
            "docker": lambda: DockerRuntime("n", self._docker),
            "process": lambda: ProcessRuntime(
                self._folder,
                "n",
                "boot",
                settings=ProcessSettings.model_validate({"allowed-groups": [7]}),
                accounts=UserAccounts(ACCOUNT),
                cgroups=Cgroups(self._requests),
            ),
            "systemd": lambda: SystemdRuntime(
                self._folder,
                "n",
                "boot",
                SystemdSettings.model_validate({"allowed-groups": [7]}),
                UserAccounts(),
            ),
        }
        return factories[name]()


def test_each_member_has_another_value_here() -> None:
    assert OTHER.keys() == MEMBERS.keys()


def test_each_member_has_an_option_with_its_description() -> None:
    options = {
        option.name: option
        for command in (create, run)
        for option in command.params
        if isinstance(option, MemberOption)
    }
    assert {*options, *WITHOUT_OPTION} == MEMBERS.keys()
    assert len(options) + len(WITHOUT_OPTION) == len(MEMBERS)
    for name, option in options.items():
        assert option.help == str(MEMBERS[name].description).replace("`", "")
        assert option.multiple == isinstance(MEMBERS[name].default, list | dict), name


@pytest.mark.parametrize("member", MEMBERS)
def test_each_member_changes_the_spec(member: str) -> None:
    usual, other = (spec_of(content) for content in body(member))
    assert (usual.spec_hash == other.spec_hash) == (member in NOT_COMPARED)
    assert replace(usual, spec_hash="") != replace(other, spec_hash="")


@pytest.mark.parametrize("member", [name for name in OF_AGENTD if name != "overcommit"])
async def test_agentd_carries_out_its_own_members(member: str) -> None:
    """Each shows in the kernel, but `overcommit`, which only lifts a refusal."""
    usual, other = [asdict((await planned(spec_of(content)))[0]) for content in body(member)]
    assert usual | {"spec_hash": ""} != other | {"spec_hash": ""}


@pytest.mark.parametrize("runtime", ["docker", "process", "systemd"])
@pytest.mark.parametrize("member", [name for name in MEMBERS if name not in OF_AGENTD])
async def test_each_runtime_carries_out_a_member_or_refuses_it(
    member: str, runtime: str, folder: Path
) -> None:
    host = Host(folder)
    specs = [spec_of(content) for content in body(member)]
    checked = host.runtime(runtime)
    problems, ignored = [], []
    for spec in specs:
        refused = unsupported_members(spec, runtime, checked.members)
        problems.append([p.where for p in (*refused, *await checked.validate_spec(spec))])
        if runtime != "docker":
            ignored.append((await checked.support(spec)).not_enforced)
    await checked.close()
    assert problems[0] == []
    if problems[1]:
        assert problems[1] == [member]
    elif not ignored or member not in ignored[1]:
        plans = [replace((await planned(spec))[1], record="") for spec in specs]
        usual, other = [await host.requests(runtime, plan) for plan in plans]
        assert usual != other
        assert usual


def test_each_member_is_carried_out_by_some_runtime() -> None:
    assert {*OF_AGENTD, *CONTAINER_MEMBERS, *HOST_MEMBERS} == MEMBERS.keys()


async def test_member_that_a_runtime_does_not_name_is_refused() -> None:
    rig = Rig()
    await rig.relist()
    rig.runtime.members = frozenset({"command", "image", "env"})
    spec = spec_of({**USUAL, "shm_size": 4096, "working_dir": "/tmp", "env": {"A": "b"}})
    with pytest.raises(InvalidRequest) as refused:
        await rig.service.create(spec)
    assert [str(problem) for problem in refused.value.problems] == [
        "working_dir: not supported by the fake runtime",
        "shm_size: not supported by the fake runtime",
    ]
    assert rig.state.ledger.holdings == {}
