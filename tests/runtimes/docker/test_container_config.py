"""The request to an engine, and requests that the operator's rules refuse before."""

import pytest
from msgspec.structs import replace

from agentd.config.runtimes import DockerSettings
from agentd.core.allocation.ports import Port
from agentd.core.kernel.edits import ContainerEdits, DeviceNode, DeviceRequest, Mount
from agentd.core.kernel.options import Ulimit, over_ceiling
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import KernelSpec
from agentd.plugin_api import Features
from agentd.runtimes.docker.container_config import container_config, program_of, request_problems
from agentd.runtimes.docker.docker_facts import DockerFacts
from agentd.runtimes.docker.mounts import MountSource
from contracts.test_runtime import plan

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


EDITS = ContainerEdits(
    env={"CUDA_VISIBLE_DEVICES": "0"},
    device_nodes=(DeviceNode("/dev/nvidia0", "/dev/nvidia0"),),
    mounts=(Mount("/usr/lib/cuda", "/cuda"),),
    cdi=("nvidia.com/gpu=0",),
    device_requests=(DeviceRequest("nvidia", ("GPU-1",)),),
    groups=("44",),
)

FULL_SETTINGS = DockerSettings.model_validate(
    {
        "network": "none",
        "capabilities": ["KILL"],
        "log-max-size": "1m",
        "log-max-files": 3,
        "default-ulimits": {"nofile": 7, "core": {"soft": 0, "hard": 1}},
    }
)


def full_plan() -> KernelPlan:
    options = {
        "pull_policy": "always",
        "platform": "linux/arm64",
        "network": "lan",
        "tmpfs": [{"target": "/scratch", "size": 4096}, {"target": "/more"}],
        "shm_size": 8192,
        "pids_limit": 9,
        "ulimits": {"nofile": {"soft": 10, "hard": -1}},
        "init": True,
        "groups": [2000],
        "entrypoint": ["tini", "--"],
    }
    mounts = (Mount("/link", "/data", read_only=False),)
    further = {"labels": {"team": "a"}, "working_dir": "/work", "user": "1000", "mounts": mounts}
    full = plan("train", "--fast", env={"A": "b"}, options=options, **further)
    return replace(
        full,
        node_id="n",
        edits=EDITS,
        env={"A": "b", "CUDA_VISIBLE_DEVICES": "0"},
        cpus=("2", "3"),
        memory_bytes=1 << 20,
        record="the record",
        device_label="the devices",
        ports=(Port(80, 30000, "tcp", "10.0.0.1"), Port(53, None, "udp", "10.0.0.1")),
    )


def test_a_full_spec_is_a_full_request() -> None:
    full = full_plan()
    facts = DockerFacts(Features("docker"), frozenset(), reads_recursively=True)
    sources = [MountSource("/real", 1, 2)]
    assert container_config(full, FULL_SETTINGS, sources, facts) == {
        "Image": full.spec.image,
        "Cmd": ["train", "--fast"],
        "Entrypoint": ["tini", "--"],
        "WorkingDir": "/work",
        "User": "1000",
        "Env": ["A=b", "CUDA_VISIBLE_DEVICES=0"],
        "Labels": {
            "team": "a",
            "io.agentd.schema": "2",
            "io.agentd.node": "n",
            "io.agentd.agent": "agent-1",
            "io.agentd.kernel": "k1",
            "io.agentd.record": "the record",
            "io.agentd.devices": "the devices",
        },
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
        "HostConfig": {
            "CpusetCpus": "2,3",
            "Memory": 1 << 20,
            "MemorySwap": 1 << 20,
            "PidsLimit": 9,
            "Ulimits": [
                {"Name": "nofile", "Soft": 10, "Hard": -1},
                {"Name": "core", "Soft": 0, "Hard": 1},
            ],
            "Init": True,
            "ShmSize": 8192,
            "Devices": [
                {
                    "PathOnHost": "/dev/nvidia0",
                    "PathInContainer": "/dev/nvidia0",
                    "CgroupPermissions": "rw",
                }
            ],
            "DeviceRequests": [
                {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]},
                {"Driver": "nvidia", "DeviceIDs": ["GPU-1"], "Capabilities": [["gpu"]]},
            ],
            "GroupAdd": ["44"],
            "NetworkMode": "lan",
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "Mounts": [
                {"Type": "bind", "Source": "/real", "Target": "/data", "ReadOnly": False},
                {
                    "Type": "bind",
                    "Source": "/usr/lib/cuda",
                    "Target": "/cuda",
                    "ReadOnly": True,
                    "BindOptions": {"ReadOnlyForceRecursive": True},
                },
                {"Type": "tmpfs", "Target": "/scratch", "TmpfsOptions": {"SizeBytes": 4096}},
                {"Type": "tmpfs", "Target": "/more", "TmpfsOptions": {}},
            ],
            "PortBindings": {
                "80/tcp": [{"HostIp": "10.0.0.1", "HostPort": "30000"}],
                "53/udp": [{"HostIp": "10.0.0.1", "HostPort": ""}],
            },
            "CapDrop": ["ALL"],
            "CapAdd": ["KILL"],
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {
                "Type": "local",
                "Config": {"max-size": "1048576", "max-file": "3", "compress": "true"},
            },
        },
    }


@pytest.mark.parametrize(
    ("entrypoint", "sent", "program"),
    [
        (None, None, "train"),
        ([], [""], "train"),
        (["/bin/sh", "-c"], ["/bin/sh", "-c"], "/bin/sh"),
    ],
)
def test_entrypoint_is_the_image_s_unless_given(entrypoint, sent, program: str) -> None:
    """`[""]` is none, by the API's words; Podman 5.4 takes `[]` for the image's."""
    facts = DockerFacts(Features("docker"), "linux/amd64", frozenset())
    options = {} if entrypoint is None else {"entrypoint": entrypoint}
    made = plan("train", options=options)
    assert container_config(made, SETTINGS, [], facts).get("Entrypoint") == sent
    assert program_of(made.spec) == program


def test_kernel_without_entrypoint_needs_a_command() -> None:
    spec = KernelSpec("k", "a", (), "h", image="i", options={"entrypoint": []})
    assert [str(problem) for problem in request_problems(spec, SETTINGS)] == [
        "command: is empty; without an entrypoint it is required"
    ]
    other = replace(spec, options={"entrypoint": ["x"]})
    assert list(request_problems(other, SETTINGS)) == []
    assert program_of(replace(spec, options={})) == ""
