"""Requirements of some tests beyond the repository, and the one command that provides each.

A test that lacks one is skipped, and the closing lines of a run say so; with AGENTD_REQUIRE_ALL it
fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentd.host.cgroups.hierarchies import find_cgroups
from agentd.runtimes.systemd.unit_bundle import static_busybox

ROOT = Path(__file__).parents[2]
ENGINE_26 = Path(os.environ.get("AGENTD_ENGINE_26", "/opt/agentd-engine-26"))
"""Where Debian 13's docker.io and containerd are unpacked; `.ci/run` does it."""


@dataclass(frozen=True)
class Need:
    """Something that not every machine has: what is missing here, and what provides it."""

    missing: Callable[[], str]
    command: str


def _programs(*names: str) -> Callable[[], str]:
    return lambda: ", ".join(name for name in names if shutil.which(name) is None)


def _unless(is_there: Callable[[], object], missing: str) -> Callable[[], str]:
    return lambda: "" if is_there() else missing


AS_ROOT = "sudo make test test-chaos"
OLDER = "ce65dc8"
"""The commit of version 0.2, whose gateways run beside the ones of this tree."""


def _commit(name: str) -> Callable[[], str]:
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{name}^{{commit}}"]

    def missing() -> str:
        if shutil.which("git") is None:
            return "git"
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return "" if found else f"commit {name} in this clone"

    return missing


NEEDS = {
    "root": Need(_unless(lambda: os.geteuid() == 0, "another user runs this"), AS_ROOT),
    "docker": Need(
        _programs("dockerd", "containerd", "runc", "busybox"),
        "sudo apt-get install docker.io containerd runc busybox-static",
    ),
    "busybox": Need(
        _unless(static_busybox, "a static busybox"), "sudo apt-get install busybox-static"
    ),
    "engine-26": Need(
        _unless((ENGINE_26 / "usr/sbin/dockerd").exists, f"nothing in {ENGINE_26}"), "sudo .ci/run"
    ),
    "cgroups": Need(_unless(find_cgroups, "no cgroup can be written"), AS_ROOT),
    "fuse": Need(
        _unless(lambda: os.geteuid() == 0 and Path("/dev/fuse").exists(), "root and /dev/fuse"),
        f"sudo modprobe fuse && {AS_ROOT}",
    ),
    "etcd": Need(_programs("etcd"), "sudo apt-get install etcd-server"),
    "etcdctl": Need(_programs("etcdctl"), "sudo apt-get install etcd-client"),
    "chromium": Need(_programs("chromium"), "sudo apt-get install chromium"),
    "prometheus": Need(_programs("prometheus", "promtool"), "sudo apt-get install prometheus"),
    "curl": Need(_programs("curl"), "sudo apt-get install curl"),
    "nginx": Need(_programs("nginx"), "sudo apt-get install nginx-light"),
    "gcc": Need(_programs("gcc"), "sudo apt-get install gcc libc6-dev"),
    "openssl": Need(_programs("openssl"), "sudo apt-get install openssl"),
    "slurm": Need(
        _programs("slurmctld", "slurmd", "squeue", "munged"),
        "sudo apt-get install slurmctld slurmd slurm-client munge",
    ),
    "systemd-analyze": Need(_programs("systemd-analyze"), "sudo apt-get install systemd"),
    "systemd-tmpfiles": Need(_programs("systemd-tmpfiles"), "sudo apt-get install systemd"),
    "older-version": Need(_commit(OLDER), "git fetch --unshallow"),
}


def require(*names: str) -> None:
    """Skip the test that runs, or fail it, unless all of these are there."""
    for name in names:
        if missing := NEEDS[name].missing():
            why = f"needs {name} (missing: {missing})"
            (pytest.fail if "AGENTD_REQUIRE_ALL" in os.environ else pytest.skip)(why)


def summary(reasons: Iterable[str]) -> Iterator[str]:
    """Yield a line for each reason for which tests were skipped, the most frequent first."""
    for reason, count in Counter(reasons).most_common():
        name = reason.removeprefix("needs ").partition(" ")[0]
        enabled = f"; enable with: {NEEDS[name].command}" if name in NEEDS else ""
        yield f"{count} skipped: {reason}{enabled}"
