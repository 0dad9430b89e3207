"""Requests that only a container can fulfil are refused where there are none."""

import msgspec
import pytest

from agentd.core.kernel.options import ContainerOptions, PullPolicy
from agentd.runtimes.host.request_limits import uncontained_problems
from contracts.test_runtime import plan


@pytest.mark.parametrize("runtime", ["process", "systemd"])
@pytest.mark.parametrize(
    "option",
    [
        {"pull_policy": PullPolicy.ALWAYS},
        {"pull_policy": PullPolicy.NEVER},
        {"platform": "linux/arm64"},
        {"network": "other"},
        {"shm_size": 1 << 20},
    ],
)
def test_options_of_containers_are_refused_elsewhere(
    runtime: str, option: dict[str, object]
) -> None:
    spec = plan("sleep").spec
    assert list(uncontained_problems(spec, runtime, None, 4096, {})) == []
    asked = msgspec.structs.replace(spec, container=ContainerOptions(**option))
    (problem,) = uncontained_problems(asked, runtime, None, 4096, {})
    assert str(problem) == f"{next(iter(option))}: the {runtime} runtime has no containers"
