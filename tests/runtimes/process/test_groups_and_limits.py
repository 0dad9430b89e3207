"""Groups that a request adds to its processes, and the node's default limits."""

import resource
from pathlib import Path

import pytest

from agentd.config.runtimes import ProcessSettings
from agentd.errors import InvalidRequest, RuntimeFailure
from agentd.runtimes.host.exec_target import read_limits
from agentd.runtimes.host.user_accounts import UserAccounts, find_account
from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import plan
from runtimes.process.rig import identity


async def test_only_root_can_add_groups(folder: Path) -> None:
    accounts, settings = UserAccounts(is_unprivileged=True), ProcessSettings()
    made = ProcessRuntime(folder, "n", "b", settings=settings, accounts=accounts, cgroups=None)
    spec = plan("sleep", "1000", options={"groups": [2000]}).spec
    assert [str(problem) for problem in await made.validate_spec(spec)] == [
        "groups: agentd is not root and cannot add groups"
    ]


@pytest.mark.needs("root")
async def test_default_limits_hold_where_a_request_says_nothing(runtime, folder) -> None:
    limits = {"nofile": {"soft": 512, "hard": 1024}, "core": 0}
    settings = ProcessSettings.model_validate({"default-ulimits": limits})
    runtime.update_settings(settings)
    runtime.update_accounts(UserAccounts(find_account("nobody")))
    options = {"ulimits": {"core": {"soft": 8192, "hard": 8192}}}
    await runtime.create(plan("sleep", "1000", options=options), lambda *_: None)
    found = read_limits(identity(folder)["pid"])
    assert found[resource.RLIMIT_NOFILE] == (512, 1024)
    assert found[resource.RLIMIT_CORE] == (8192, 8192)


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("name", "limit", "why"),
    [("nofile", 2**60, "not allowed"), ("nproc", 0, "Resource temporarily unavailable")],
    ids=["above fs.nr_open", "too low to start"],
)
async def test_default_limit_that_does_not_work_is_the_node_s(
    runtime, name: str, limit: int, why: str
) -> None:
    # Linux compares nproc with what the user runs before this kernel, so something must run.
    await runtime.create(plan("sleep", "1000", kernel_id="k0"), lambda *_: None)
    settings = ProcessSettings.model_validate({"default-ulimits": {name: limit}})
    runtime.update_settings(settings)
    runtime.update_accounts(UserAccounts(find_account("nobody")))
    expected = rf"; runtime\.process\.default-ulimits\.{name}: {why}"
    with pytest.raises(RuntimeFailure, match=expected):
        await runtime.create(plan("sleep", "1000"), lambda *_: None)
    options = {"ulimits": {name: {"soft": limit, "hard": limit}}}
    with pytest.raises(InvalidRequest, match=f"ulimits.{name}: "):
        await runtime.create(plan("sleep", "1000", options=options), lambda *_: None)
