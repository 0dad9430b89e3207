import os
from pathlib import Path

import pytest

from agentd.host.probe import Host, derive_node_id, parse_cpu_list, probe


def machine(folder: Path, *, cgroup: str, limits: dict[str, str], total_kib: int = 4096) -> Path:
    files = {
        "proc/meminfo": f"MemFree: 1 kB\nMemTotal:    {total_kib} kB\n",
        "proc/self/cgroup": cgroup,
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node1/cpulist": "2-3,8\n",
        **limits,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
    return folder


@pytest.mark.parametrize(
    ("cgroup", "limits", "memory"),
    [
        ("0::/\n", {}, 4096 * 1024),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "1048576"}, 1048576),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max"}, 4096 * 1024),
        ("0::/\udcff\n", {"sys/fs/cgroup/\udcff/memory.max": "1048576"}, 1048576),
        ("4:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2097152"}, 2097152),
        ("4:memory:/x\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "3"}, 3),
        ("4:cpu:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1"}, 4096 * 1024),
    ],
)
def test_memory_is_the_least_of_machine_and_cgroups(tmp_path, cgroup, limits, memory) -> None:
    assert probe(machine(tmp_path, cgroup=cgroup, limits=limits)).memory_bytes == memory


def test_probe_reads_cores_from_the_affinity_mask(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 9})
    host = probe(machine(tmp_path, cgroup="", limits={}))
    assert host.cores == {1: 0, 3: 1, 9: None}
    assert host.real_cores == {"1", "3", "9"}


def test_declared_cores_beyond_the_real_ones_are_accounted_for() -> None:
    host = Host({0: 0, 5: 0}, 1024)
    devices = host.devices(4, 2048)
    assert [d.device_id.id for d in devices] == ["0", "5", "1", "2", "root"]
    assert devices[-1].capacity == 2048
    assert [d.device_id.id for d in host.devices(1)] == ["0", "root"]


def test_the_kernel_s_list_format() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpu_list("\n") == []


def test_the_node_id_is_derived_and_does_not_show_the_machine_id(tmp_path: Path) -> None:
    path = tmp_path / "machine-id"
    path.write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    assert derive_node_id(path) == derive_node_id(path)
    assert "3d1219" not in derive_node_id(path)


NO_MACHINE_ID = {
    "empty": b"\n",
    "an image that was not started": b"uninitialized\n",
    "not ASCII": "3d1219c7c4c5é".encode(),
    "not UTF-8": b"\xff\xfe3\0d\0",
}


@pytest.mark.parametrize("case", NO_MACHINE_ID)
def test_a_machine_id_that_is_none_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "machine-id").write_bytes(NO_MACHINE_ID[case])
    with pytest.raises(OSError, match="no machine id"):
        derive_node_id(tmp_path / "machine-id")


def test_probe_reads_the_core_of_each_thread(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    limits = {}
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 0)]):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        limits |= {
            f"{folder}/physical_package_id": f"{package}\n",
            f"{folder}/core_id": f"{core}\n",
        }
    host = probe(machine(tmp_path, cgroup="", limits=limits))
    assert host.physical == {0: "core-0-0", 1: "core-1-0", 2: "core-0-0"}
    found = {device.device_id.id: device.parent for device in host.devices()}
    assert found == {"0": "core-0-0", "1": "core-1-0", "2": "core-0-0", "3": None, "root": None}
    assert {device.parent for device in host.devices(cpus=8)} == {None}
