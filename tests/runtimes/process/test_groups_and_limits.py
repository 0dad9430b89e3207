"""Groups that a request adds to its processes, and the node's default limits."""

import resource
from pathlib import Path

import pytest

from agentd.config.runtimes import ProcessSettings
from agentd.errors import RuntimeFailure
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
    runtime.update_settings(settings, UserAccounts(find_account("nobody", "user")))
    options = {"ulimits": {"core": {"soft": 8192, "hard": 8192}}}
    await runtime.create(plan("sleep", "1000", options=options), lambda *_: None)
    found = read_limits(identity(folder)["pid"])
    assert found[resource.RLIMIT_NOFILE] == (512, 1024)
    assert found[resource.RLIMIT_CORE] == (8192, 8192)


@pytest.mark.needs("root")
async def test_default_limit_that_cannot_be_set_is_the_node_s(runtime) -> None:
    """No process may have more descriptors than fs.nr_open."""
    settings = ProcessSettings.model_validate({"default-ulimits": {"nofile": 2**60}})
    runtime.update_settings(settings, UserAccounts(find_account("nobody", "user")))
    with pytest.raises(
        RuntimeFailure, match=r"; runtime\.process\.default-ulimits\.nofile: not allowed"
    ):
        await runtime.create(plan("sleep", "1000"), lambda *_: None)
