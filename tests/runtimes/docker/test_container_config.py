"""Requests that the operator's rules refuse, before any engine is called."""

import pytest

from agentd.config.runtimes import DockerSettings
from agentd.core.kernel.edits import Mount
from agentd.core.kernel.options import Ulimit, over_ceiling
from agentd.core.kernel.states import KernelSpec
from agentd.runtimes.docker.container_config import request_problems

SETTINGS = DockerSettings(network="none", ulimits={"rtprio": 0, "nofile": 1024, "memlock": -1})


def problems(**changes) -> dict[str, str]:
    spec = KernelSpec("k", "a", ("true",), "h", image="i", **changes)
    return {problem.where: problem.why for problem in request_problems(spec, SETTINGS)}


@pytest.mark.parametrize(
    ("name", "limit", "why"),
    [
        ("nofile", Ulimit(1024, 1024), ""),
        ("nofile", Ulimit(10, 1025), "1025 exceeds the limit of 1024"),
        ("nofile", Ulimit(10, -1), "unlimited exceeds the limit of 1024"),
        ("rtprio", Ulimit(0, 0), ""),
        ("rtprio", Ulimit(1, 1), "1 exceeds the limit of 0"),
        ("memlock", Ulimit(-1, -1), ""),
        ("core", Ulimit(-1, -1), ""),
    ],
)
def test_a_limit_over_the_operator_s_is_refused(name: str, limit: Ulimit, why: str) -> None:
    expected = {f"ulimits.{name}": why} if why else {}
    options = {"ulimits": {name: {"soft": limit.soft, "hard": limit.hard}}}
    assert problems(options=options) == expected
    assert dict(over_ceiling({name: limit}, SETTINGS.ulimits)) == ({name: why} if why else {})


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/data", ""),
        ("/process", ""),
        ("/proc", "expected another target"),
        ("/proc/sys", "expected another target"),
        ("//proc/./sys/", "expected another target"),
        ("/sys/fs/cgroup", "expected another target"),
        ("/../etc", "without .."),
        ("/data/../../etc", "without .."),
        ("/", "expected a folder below /"),
        ("/.", "expected a folder below /"),
    ],
)
def test_places_that_an_engine_refuses_are_named(target: str, why: str) -> None:
    for changes, where in (
        ({"mounts": (Mount("/x", target),)}, "mounts.0.target"),
        ({"options": {"tmpfs": [{"target": target}]}}, "tmpfs.0.target"),
    ):
        found = problems(**changes)
        assert bool(found) is bool(why)
        assert why in found.get(where, "")
