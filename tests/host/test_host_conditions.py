import json
from pathlib import Path

import pytest

from agentd.host.host_conditions import host_conditions


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GPU = {
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
}
APPARMOR = {"sys/module/apparmor/parameters/enabled": "Y\n"}
SYSTEMD = {"run/systemd/system/x": ""}
DRIVER = {"sys/module/nvidia/version": "1\n"}


@pytest.mark.parametrize(
    ("files", "engine", "plugins", "said"),
    [
        ({}, False, (), []),
        ({}, True, (), ["live-restore"]),
        ({"etc/docker/daemon.json": json.dumps({"live-restore": True})}, True, (), []),
        ({"etc/docker/daemon.json": "rubbish"}, True, (), ["live-restore"]),
        ({"proc/7/cmdline": "/usr/bin/dockerd\0--live-restore\0"}, True, (), []),
        (APPARMOR, False, (), []),
        (APPARMOR, True, (), ["live-restore", "apparmor_parser is missing"]),
        ({**APPARMOR, "sbin/apparmor_parser": ""}, True, (), ["live-restore"]),
        ({"sys/fs/cgroup/memory/tasks": "", **SYSTEMD}, False, (), ["cgroup v1"]),
        ({"sys/fs/cgroup/memory/tasks": ""}, False, (), []),  # no systemd, so nothing is lost
        ({"sys/fs/cgroup/memory/tasks": ""}, True, (), ["live-restore"]),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu"}, False, (), []),
        (GPU, False, (), []),
        (GPU, False, ("cuda",), ["driver nvidia is not loaded"]),
        ({**GPU, **DRIVER}, False, ("cuda",), []),
        ({**GPU, **DRIVER}, False, ("rocm",), ["but plugin cuda is not"]),
    ],
)  # fmt: skip
def test_oddities_of_a_host_are_conditions(files, engine, plugins, said, tmp_path) -> None:
    root = machine(tmp_path, **files)
    socket = machine(tmp_path, **{"docker.sock": ""}) / "docker.sock" if engine else None
    found = [*map(str, host_conditions(socket, plugins, root))]
    assert len(found) == len(said), found
    assert all(part in text for part, text in zip(said, found, strict=True))
