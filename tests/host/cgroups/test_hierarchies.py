"""Where groups are made, what holds in them, and who is told of by them."""

from pathlib import Path

from agentd.host.cgroups.hierarchies import (
    MEMORY,
    PIDS,
    Cgroups,
    Hierarchy,
    find_cgroups,
    find_existing_cgroups,
)


def v2(folder: Path, controllers: str) -> Path:
    for name, text in {
        "proc/self/cgroup": "0::/svc\n",
        "sys/fs/cgroup/cgroup.controllers": controllers,
        "sys/fs/cgroup/cgroup.subtree_control": "",
        "sys/fs/cgroup/agentd-kernels/cgroup.subtree_control": "",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_no_controller_that_is_wanted_means_no_groups(tmp_path: Path) -> None:
    assert find_cgroups(tmp_path) is None
    assert find_cgroups(v2(tmp_path, "cpu io")) is None


def test_cgroup_v2_has_all_limits_in_one_folder(tmp_path: Path) -> None:
    cgroups = Cgroups((Hierarchy(tmp_path, 2, frozenset({MEMORY, PIDS}), False),))
    group = cgroups.group("k1")
    group.folders[0].mkdir()
    (group.folders[0] / "memory.swap.max").write_text("max")
    cgroups.create(group, {MEMORY: 4096, PIDS: 7}, {"devices": "not kept"})
    written = {path.name: path.read_text() for path in group.folders[0].iterdir()}
    assert written == {"memory.max": "4096", "memory.swap.max": "0", "pids.max": "7"}
    assert not cgroups.keeps_attributes
    assert group.attribute("devices") == ""


def test_on_v1_each_controller_has_a_hierarchy_of_its_own(tmp_path: Path) -> None:
    text = "4:memory:/x\n3:cpu,cpuacct:/\n2:pids:/x\n1:name=systemd:/\n0::/\n"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    assert find_cgroups(tmp_path) is None  # nothing can be made there
    for name in (MEMORY, PIDS):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
    # plain folders keep the probe's files, so they count as such that cannot be used
    assert find_cgroups(tmp_path) is None


def test_existing_groups_are_read_and_have_no_limits_to_give(tmp_path: Path) -> None:
    assert find_existing_cgroups(tmp_path) is None
    folder = v2(tmp_path, "cpu io") / "sys/fs/cgroup/agentd-kernels"
    (folder / "k1").mkdir()
    (folder / "k1" / "cgroup.procs").write_text("7\n8\n")
    existing = find_existing_cgroups(tmp_path)
    assert existing is not None
    assert (existing.is_writable, existing.controllers) == (False, frozenset())
    assert existing.group("k1").members() == {7, 8}
    existing.group("k1").kill()
    assert existing.counters("k1").folders == {"": str(folder / "k1")}
