from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm.cli import gres
from agentd_slurm.gres import (
    NoGres,
    choose_agent,
    files_of,
    gpus_of,
    gres_conf,
    gres_map,
    node_gres,
)
from agentd_slurm.gres_map import GresDevice, GresMap, UnusableMap, parse_map, read_map


def device(device_id: str, name: str = "cuda", **members: Any) -> dict[str, Any]:
    """A row of `/v1/devices`."""
    return {
        "device_name": name,
        "id": device_id,
        "stable_id": f"GPU-{device_id}",
        "aliases": [],
        "files": [],
        "reason": "",
        "agents": ["slurm"],
        "state": "ok",
        **members,
    }


def test_gres_lists_devices_in_natural_order() -> None:
    rows = [device("cuda10"), device("cuda2"), device("core0", name="cpu")]
    mapped = gres_map("slurm", gpus_of("slurm", rows))
    files = {"GPU-cuda2": ["/dev/nvidia2"], "GPU-cuda10": ["/dev/nvidia0"]}
    assert gres_conf(mapped, files) == [
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


def test_gres_names_several_files_of_a_device_in_order() -> None:
    of_instance = ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap2"]
    rows = [device("cuda0:0", files=of_instance), device("cuda1", files=["/dev/x"])]
    assert gres_conf(gres_map("slurm", rows), files_of(rows)) == [
        f"Name=gpu Type=cuda0_0 MultipleFiles={','.join(of_instance)}",
        "Name=gpu Type=cuda1 File=/dev/x",
    ]


def test_gres_refuses_devices_without_files_of_their_own() -> None:
    rows = [device("npu0"), device("npu1", files=["/dev/npu1"]),
            device("npu2", state="unhealthy", reason="no answer")]  # fmt: skip
    with pytest.raises(NoGres, match=r"of its own: npu0, npu2 \(no answer\); .* --files"):
        files_of(rows)
    stand_ins = {"GPU-npu0": ["/x/npu0"], "GPU-npu1": ["/dev/npu1"], "GPU-npu2": ["/x/npu2"]}
    assert files_of(rows, "/x") == stand_ins


@pytest.mark.parametrize(
    ("role", "files", "options", "status", "text"),
    [
        ("admin", ["/dev/npu0"], [], 0, "Name=gpu Type=npu0 File=/dev/npu0"),
        ("admin", [], [], 1, "Error: no device file of its own: npu0"),
        ("admin", [], ["--files", "/x"], 0, "/x/npu0 is missing; create it"),
        ("admin", [], ["--json"], 0, '"stable_id": "GPU-npu0"'),
        ("read", [], [], 1, "role read cannot list device files (required: admin)"),
        ("read", [], ["--json"], 0, '"stable_id": "GPU-npu0"'),
    ],
)
def test_gres_command_prints_or_says_why_not(
    role: str, files: list[str], options: list[str], status: int, text: str
) -> None:
    client = SimpleNamespace(
        agents=lambda: [{"agent_id": "slurm"}],
        devices=lambda: [device("npu0", files=files)],
        whoami=lambda: {"role": role},
    )
    result = CliRunner().invoke(gres, options, obj=client)
    assert (result.exit_code, text in result.output) == (status, True), result.output


@pytest.mark.parametrize("file", ["/dev/a,b", "/dev/a[0-3]", "/dev/a b", "/dev/a#", "dev/a"])
def test_gres_refuses_files_that_it_cannot_name(file: str) -> None:
    with pytest.raises(NoGres, match="cannot name a device file of npu0"):
        files_of([device("npu0", files=[file])])


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
        ('{"agent": "a", "devices": {"0": {"id": "c", "stable_id": "\\ud800"}}}', "device 0"),
        ('{"agent": "a", "devices": {"0": {"id": "c", "stable_id": "s", "type": ""}}}', "device 0"),
        (
            '{"agent": "a", "devices": {"0": {"id": "c", "stable_id": "s", "type": "a:b"}}}',
            "0: got",
        ),
        ('{"agent": "a", "devices": {"0": ' + "[" * 900 + "]" * 900 + "}}", "invalid device 0"),
        ('{"agent": "a", "devices": {"' + "9" * 5000 + '": {}}}', "invalid index"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_map_that_is_malformed_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UnusableMap, match=reason):
        parse_map(text)


def test_map_that_is_missing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UnusableMap, match="create it with: agentctl slurm gres --json"):
        read_map(tmp_path / "none.json")


def test_map_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    mapped = GresMap.of("slurm", [GresDevice("cuda0", "GPU-0")])
    (tmp_path / "map.json").write_text(json.dumps(mapped.as_json()), encoding="utf-8-sig")
    assert read_map(tmp_path / "map.json") == mapped


def test_map_without_types_names_each_device_by_its_id() -> None:
    entries = {"0": {"id": "cuda0:1", "stable_id": "x"}, "1": {"id": "c", "stable_id": "y"}}
    entries["1"]["type"] = "a100"
    mapped = parse_map(json.dumps({"agent": "slurm", "devices": entries}))
    assert [device.gres_type for device in mapped.devices.values()] == ["cuda0_1", "a100"]
    assert mapped.as_json()["devices"] == entries


@given(st.lists(st.from_regex(r"cuda[0-9]{1,3}", fullmatch=True), unique=True))
def test_map_is_read_back_in_its_order(ids: list[str]) -> None:
    devices = [GresDevice(name, f"GPU-{name}", "a100" * (len(name) % 2)) for name in ids]
    mapped = GresMap.of("slurm", devices)
    assert parse_map(json.dumps(mapped.as_json())) == mapped
    numbers = [int(entry.device_id.removeprefix("cuda")) for entry in mapped.devices.values()]
    assert numbers == sorted(numbers)
