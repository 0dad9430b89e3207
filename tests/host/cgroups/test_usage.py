"""Figures of cgroups, as the files of both versions give them; what has no file is not known."""

import os
from pathlib import Path

import pytest

from agentd.core.kernel.usage import Usage, UsageReading
from agentd.host.cgroups import usage
from agentd.host.cgroups.usage import UNIFIED, CgroupCounters, read_cgroups

IO_STAT = "8:0 rbytes=100 wbytes=7 rios=1 wios=1 dbytes=0 dios=0\n8:16 rbytes=1 wbytes=2\n"
IO_SERVICE = "8:0 Read 100\n8:0 Write 7\n8:0 Sync 1\n8:16 Read 1\n8:16 Write 2\nTotal 110\n"


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def counted(**folders: Path) -> UsageReading:
    """Count one kernel; `unified` is where v2 counts it."""
    paths = {UNIFIED if name == "unified" else name: str(path) for name, path in folders.items()}
    return usage.read_usages({"k1": CgroupCounters(paths)})["k1"]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(usage, "MOUNT", tmp_path)
    return tmp_path


def test_every_figure_of_v2(mount: Path) -> None:
    put(mount, io__stat=IO_STAT)
    folder = put(
        mount / "agentd.slice/k1.service",
        cpu__stat="usage_usec 2500000\nuser_usec 1\nthrottled_usec 500000\n",
        memory__current="4096\n", memory__peak="8192\n", memory__max="16384\n",
        io__stat=IO_STAT, cgroup__procs="10\n11\n",
    )  # fmt: skip
    put(folder / "below", cgroup__procs="12\n")
    found = counted(unified=folder)
    assert found.usage == Usage(2.5, 0.5, 4096, 8192, 16384, 101, 9, 3)
    assert found.groups == {":/agentd.slice/k1.service"}


def test_every_figure_of_v1(mount: Path) -> None:
    put(mount / "blkio", blkio__throttle__io_service_bytes=IO_SERVICE)
    files = {
        "memory": {
            "memory__usage_in_bytes": "4096\n", "memory__max_usage_in_bytes": "8192\n",
            "memory__limit_in_bytes": "16384\n", "cgroup__procs": "10\n",
        },
        "cpuacct": {"cpuacct__usage": "2500000000\n"},
        "cpu": {"cpu__stat": "nr_periods 1\nthrottled_time 500000000\n"},
        "blkio": {"blkio__throttle__io_service_bytes": IO_SERVICE},
    }  # fmt: skip
    folders = {name: put(mount / name / "docker/1", **texts) for name, texts in files.items()}
    found = counted(**folders)
    assert found.usage == Usage(2.5, 0.5, 4096, 8192, 16384, 101, 9, 1)
    assert found.groups == {f"{name}:/docker/1" for name in files}


def test_missing_files_mean_unknown_usage(mount: Path) -> None:
    assert counted().usage == Usage()
    assert counted(unified=mount / "gone").usage == Usage()
    assert counted(memory=mount / "gone").usage == Usage()
    empty = put(mount / "x", memory__max="max\n", memory__current="what\n", cgroup__procs="")
    assert counted(unified=empty).usage == Usage(processes=0)
    no_limit = put(mount / "memory/y", memory__limit_in_bytes=f"{2**63 - 4096}\n", cgroup__procs="")
    assert counted(memory=no_limit).usage.memory_limit_bytes is None


@pytest.mark.parametrize("machine", ["", "Total 0\n"])
def test_blocks_are_not_known_where_the_machine_counts_none(mount: Path, machine: str) -> None:
    put(mount / "blkio", blkio__throttle__io_service_bytes=machine)
    put(mount, io__stat="")
    v1 = put(mount / "blkio/k1", blkio__throttle__io_service_bytes="Total 0\n")
    v2 = put(mount / "k1", io__stat="", cgroup__procs="")
    for found in (counted(blkio=v1), counted(unified=v2)):
        usage = found.usage
        assert (usage.io_read_bytes, usage.io_write_bytes) == (None, None)


def test_kernel_with_many_cgroups_delays_no_other(mount: Path, monkeypatch) -> None:
    folder = put(mount / "k1", cgroup__procs="1\n")
    for number in range(5):
        put(folder / str(number), cgroup__procs="2\n")
    assert counted(unified=folder).usage.processes == 6
    monkeypatch.setattr(usage, "_MAX_SUBGROUPS", 3)
    assert counted(unified=folder).usage.processes is None


def test_a_group_s_name_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"0::/user.slice/\xff\n3:pids:/x\n")
    assert read_cgroups(1) == {":/user.slice/\udcff", "pids:/x"}


def test_a_name_of_an_interface_may_have_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unshare -rn ip link set lo name $'a\\x1cb'` needs no rights."""
    numbers = b"7" + b" 0" * 7 + b" 8" + b" 0" * 7
    table = b"Inter-| Receive\n face |bytes\n a\x1c\x85\xff: %s\n  lo: %s\n" % (numbers, numbers)
    monkeypatch.setattr(Path, "read_bytes", lambda _: table)
    monkeypatch.setattr(usage, "_namespace", str)
    assert usage._read_network(1) == (7, 8)


def test_the_groups_of_a_process_are_those_that_the_kernel_names() -> None:
    mine = read_cgroups(os.getpid())
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    assert {group.partition(":")[2] for group in mine} <= {line.split(":", 2)[2] for line in lines}
    assert mine
    assert read_cgroups(2**22 + 1) == set()
