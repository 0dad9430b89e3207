from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm.device_files import assign_files
from agentd_slurm.gres import NoGres, choose_agent, gpus_of, gres_conf, gres_map, node_gres
from agentd_slurm.gres_map import GresDevice, GresMap, UnusableMap, parse_map, read_map


def device(device_id: str, name: str = "cuda", **members: Any) -> dict[str, Any]:
    """A row of `/v1/devices`."""
    return {
        "device_name": name,
        "id": device_id,
        "stable_id": f"GPU-{device_id}",
        "aliases": [],
        "agents": ["slurm"],
        "state": "ok",
        **members,
    }


def test_gres_lists_devices_in_natural_order() -> None:
    rows = [device("cuda10"), device("cuda2"), device("core0", name="cpu")]
    mapped = gres_map("slurm", gpus_of("slurm", rows))
    assert gres_conf(mapped, {"GPU-cuda2": "/dev/nvidia2", "GPU-cuda10": "/dev/nvidia0"}) == [
        "Name=gpu Type=cuda2 File=/dev/nvidia2",
        "Name=gpu Type=cuda10 File=/dev/nvidia0",
    ]
    assert node_gres(mapped) == "Gres=gpu:cuda2:1,gpu:cuda10:1"
    assert mapped.as_json() == {
        "agent": "slurm",
        "devices": {
            "0": {"id": "cuda2", "stable_id": "GPU-cuda2"},
            "1": {"id": "cuda10", "stable_id": "GPU-cuda10"},
        },
    }


def test_type_has_no_character_that_slurm_refuses() -> None:
    assert GresDevice("cuda0:1g.10gb", "x").gres_type == "cuda0_1g.10gb"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        pytest.param([], "has no accelerators", id="none"),
        pytest.param([device("cuda0", agents=["other"])], "has no accelerators", id="another's"),
        pytest.param([device("cuda0", state="gone")], "has no accelerators", id="missing"),
        pytest.param([device("a:0"), device("a_0")], "the same type a_0", id="types that meet"),
    ],
)
def test_gres_without_devices_is_refused(rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(NoGres, match=reason):
        gpus_of("slurm", rows)


def test_agent_may_be_left_out_where_there_is_one() -> None:
    assert choose_agent(None, ["main"]) == "main"
    with pytest.raises(NoGres, match=r"name one with --agent \(a, b\)"):
        choose_agent(None, ["b", "a"])
    with pytest.raises(NoGres, match=r"unknown agent c \(this node has: a, b\)"):
        choose_agent("c", ["b", "a"])


def test_files_come_from_the_driver_and_from_sysfs(tmp_path: Path) -> None:
    nvidia = tmp_path / "proc/driver/nvidia/gpus/0000:65:00.0/information"
    nvidia.parent.mkdir(parents=True)
    nvidia.write_text("Model: \t A\nGPU UUID: \t GPU-cuda0\nDevice Minor: \t 3\n")
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0/drm/renderD129").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").symlink_to("/dev/null")
    rows = [
        device("cuda0"),
        device("rocm0", aliases=["0000:03:00.0"]),
        device("tpu0", aliases=["dev:accel0"]),
        device("sim0"),
    ]
    assert assign_files(rows, "/stand-ins", tmp_path) == (
        {
            "GPU-cuda0": "/dev/nvidia3",
            "GPU-rocm0": "/dev/dri/renderD129",
            "GPU-tpu0": "/dev/accel0",
            "GPU-sim0": "/stand-ins/sim0",
        },
        ["/stand-ins/sim0"],
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "invalid JSON"),
        ("[]", "expected"),
        ('{"agent": "a"}', "expected"),
        ('{"agent": 1, "devices": {}}', "invalid agent: got 1"),
        ('{"agent": "a", "devices": {"x": {}}}', "invalid index: got 'x'"),
        ('{"agent": "a", "devices": {"01": {}}}', "invalid index: got '01'"),
        ('{"agent": "a", "devices": {"0": {"id": "cuda0"}}}', "invalid device 0"),
    ],
)
def test_map_that_is_malformed_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UnusableMap, match=reason):
        parse_map(text)


def test_map_that_is_missing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UnusableMap, match="create it with: agentctl slurm gres --json"):
        read_map(tmp_path / "none.json")


@given(st.lists(st.from_regex(r"cuda[0-9]{1,3}", fullmatch=True), unique=True))
def test_map_is_read_back_in_its_order(ids: list[str]) -> None:
    mapped = GresMap.of("slurm", [GresDevice(name, f"GPU-{name}") for name in ids])
    assert parse_map(json.dumps(mapped.as_json())) == mapped
    numbers = [int(entry.device_id.removeprefix("cuda")) for entry in mapped.devices.values()]
    assert numbers == sorted(numbers)
