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
from agentd_slurm.decisions.doctor import check_gres
from agentd_slurm.gres import (
    NoGres,
    choose_agent,
    files_of,
    gpus_of,
    gres_conf,
    gres_map,
    model_types,
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
        "model": "NVIDIA A100-SXM4-40GB",
        "numa_node": None,
        "slot": f"{name}.device",
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


@pytest.mark.parametrize(
    ("model", "gres_type"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA TITAN V", "titanv"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("AMD Radeon PRO W6800", "w6800"),
        ("TPU v5e", "v5e"),
        ("0x740c", "cuda"),
        ("", "cuda"),
    ],
)
def test_type_of_a_model_is_the_name_sites_use(model: str, gres_type: str) -> None:
    assert model_types([device("cuda0", model=model)]) == {"cuda0": gres_type}


def test_type_of_an_instance_has_its_profile() -> None:
    instance = device("cuda0:1", slot="cuda.device:1g.10gb.me-mig")
    assert model_types([instance]) == {"cuda0:1": "a100_1g.10gb.me"}


def test_gres_has_a_line_for_each_model_and_its_cores() -> None:
    """The lines of a model stand together: Slurm counts type by type."""
    rows = [
        device("cuda0", files=["/dev/nvidia3"], model="V100", numa_node=0),
        device("cuda1", files=["/dev/nvidia1"], numa_node=1),
        device("cuda2", files=["/dev/nvidia0"], numa_node=1),
        device("cuda3", files=["/dev/nvidia2"], model="V100", numa_node=0),
        device("cuda10", files=["/dev/nvidia4"], numa_node=0),
        device("cuda11", files=["/dev/nvidia5"], numa_node=1),
    ]
    mapped = gres_map("slurm", rows, model_types(rows))
    near = {row["stable_id"]: ["0-7", "8-15"][row["numa_node"]] for row in rows}
    assert gres_conf(mapped, files_of(rows), near) == [
        "Name=gpu Type=v100 File=/dev/nvidia3,/dev/nvidia2 Cores=0-7",
        "Name=gpu Type=a100 File=/dev/nvidia1,/dev/nvidia0 Cores=8-15",
        "Name=gpu Type=a100 File=/dev/nvidia4 Cores=0-7",
        "Name=gpu Type=a100 File=/dev/nvidia5 Cores=8-15",
    ]
    assert node_gres(mapped) == "Gres=gpu:v100:2,gpu:a100:4"
    order = ["cuda0", "cuda3", "cuda1", "cuda2", "cuda10", "cuda11"]
    assert [one.device_id for one in mapped.devices.values()] == order
    assert [one.gres_type for one in mapped.devices.values()] == ["v100"] * 2 + ["a100"] * 4


def test_doctor_compares_the_order_of_the_types() -> None:
    rows = [device("cuda0"), device("cuda1", model="V100"), device("cuda2")]
    mapped = gres_map("slurm", rows, model_types(rows))
    assert check_gres(mapped, "gpu:a100:2(S:0-1),gpu:v100:1(S:1)").passed
    for wrong in ("gpu:v100:1,gpu:a100:2", "gpu:a100:2", "gpu:a100:1,gpu:v100:1", "(null)"):
        assert not check_gres(mapped, wrong).passed


def test_site_names_types_itself() -> None:
    rows = [device("cuda0"), device("cuda1"), device("cuda2", model="NVIDIA A100 80GB PCIe")]
    assert set(model_types(rows, ["gpu"]).values()) == {"gpu"}
    named = {"cuda0": "a100", "cuda1": "a100", "cuda2": "a100-80"}
    assert model_types(rows, ["a100-80=cuda2"]) == named
    with pytest.raises(NoGres, match=r"A100-SXM4-40GB and NVIDIA A100 80GB PCIe .* --type"):
        model_types(rows)


@pytest.mark.parametrize("text", ["", "8", "a:b", "a b", "=cuda0", "a=cuda9", "a=cuda0,"])
def test_type_that_slurm_or_the_agent_lacks_is_refused(text: str) -> None:
    with pytest.raises(NoGres, match="invalid --type"):
        model_types([device("cuda0")], [text])


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


def test_gres_command_types_shared_devices_one_by_one() -> None:
    client = SimpleNamespace(
        agents=lambda: [{"agent_id": "slurm"}, {"agent_id": "team"}],
        devices=lambda: [device("cuda0", files=["/dev/a"], agents=["slurm", "team"])],
        whoami=lambda: {"role": "admin"},
    )
    result = CliRunner().invoke(gres, ["--agent=slurm"], obj=client)
    assert "Name=gpu Type=cuda0 File=/dev/a\n" in result.output, result.output


@pytest.mark.parametrize(
    ("role", "files", "options", "status", "text"),
    [
        ("admin", ["/dev/npu0"], [], 0, "Name=gpu Type=a100 File=/dev/npu0\n"),
        ("admin", ["/dev/npu0"], ["--types=device"], 0, "Name=gpu Type=npu0 File=/dev/npu0\n"),
        ("admin", ["/dev/npu0"], ["--type=big"], 0, "Name=gpu Type=big File=/dev/npu0\n"),
        ("admin", [], [], 1, "Error: no device file of its own: npu0"),
        ("admin", [], ["--files", "/x"], 0, "rm -f /x/npu0; mknod -m 666 /x/npu0 c 4095 0"),
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
    mapped = GresMap.of("slurm", [GresDevice(name, f"GPU-{name}", "a100") for name in ids])
    assert parse_map(json.dumps(mapped.as_json())) == mapped
    numbers = [int(entry.device_id.removeprefix("cuda")) for entry in mapped.devices.values()]
    assert numbers == sorted(numbers)
