"""The systemd runtime's pure parts; the rest is shown on a real node, in tests/node."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.config.runtimes import SystemdSettings
from agentd.core.allocation.ledger import Allocation, Ledger
from agentd.core.kernel.edits import ContainerEdits, DeviceNode, Mount
from agentd.core.kernel.plan import (
    KernelPlan,
    PlanContext,
    agent_resource_cap,
    build_plan,
    name_prefix,
)
from agentd.core.kernel.states import Kernel, KernelSpec, KernelState, ObservedState
from agentd.core.kernel.usage import Usage
from agentd.errors import InvalidRequest, NotReady, RuntimeFailure, RuntimeUnavailable
from agentd.host.systemd.availability import parse_version, systemd_problems
from agentd.host.systemd.dbus import SystemdManager
from agentd.host.systemd.unit_paths import UNIT_PATH, unit_exists, unit_of_path
from agentd.runtimes.host.user_accounts import UserAccount, UserAccounts
from agentd.runtimes.systemd.runtime import SystemdRuntime
from agentd.runtimes.systemd.slices import journal_conditions
from agentd.runtimes.systemd.unit import (
    core_mask,
    escape_words,
    kernel_id_of_unit,
    properties,
    request_problems,
    slice_name,
    unit_name,
)
from agentd.runtimes.systemd.unit_bundle import (
    DROP_IN,
    UnitBundle,
    UnitEnd,
    UnitIdentity,
    quote_value,
    static_busybox,
)
from agentd.runtimes.systemd.unit_observer import UnitObserver
from agentd.runtimes.systemd.unit_state import parse_end, state_of
from support.needs import require


def plan(*command: str, edits: ContainerEdits | None = None, **spec: Any) -> KernelPlan:
    made = KernelSpec("k1", "team-a", command, "hash", **spec)
    kernel = Kernel("k1", "team-a", KernelState.PREPARING, "hash", 1.0, "systemd",
                    allocation=Allocation(()))  # fmt: skip
    return build_plan(made, kernel, edits or ContainerEdits(), PlanContext("n", (), frozenset()))


OWN = plan("true").record


NO_ACCOUNTS = UserAccounts()


def told(made: KernelPlan, accounts: UserAccounts = NO_ACCOUNTS, **settings: Any) -> dict[str, Any]:
    read = SystemdSettings.model_validate(settings, by_name=True)
    found = properties(made, "/state/units/k1", read, accounts, [0])
    return {name: value for name, _, value in found}


def test_names_lead_back_to_kernels() -> None:
    assert kernel_id_of_unit("n", unit_name("n", "k-1.x")) == "k-1.x"
    assert kernel_id_of_unit("other", unit_name("n", "k1")) is None
    assert kernel_id_of_unit("n", "agentd-fleet-join.service") is None
    for name in ("", "..", "a@b", "x" * 64):
        assert kernel_id_of_unit("n", f"{name_prefix('n')}{name}.service") is None
        with pytest.raises(ValueError, match="invalid name"):
            unit_name("n", name)
    assert slice_name("team-a") == r"agentd-team\x2da.slice"


def test_a_path_leads_back_to_its_unit() -> None:
    path = f"{UNIT_PATH}agentd_2d0a1b_2dk_2d1_2ex_2eservice"
    assert unit_of_path(path) == "agentd-0a1b-k-1.x.service"


@given(st.sets(st.integers(0, 300)))
def test_a_mask_has_a_bit_for_each_number(numbers: set[int]) -> None:
    bits = int.from_bytes(core_mask(numbers), "little")
    assert {n for n in range(301) if bits >> n & 1} == numbers


@pytest.mark.parametrize(
    ("active", "sub", "state"),
    [("active", "running", ObservedState.RUNNING), ("active", "exited", ObservedState.EXITED),
     ("failed", "failed", ObservedState.EXITED), ("activating", "start", ObservedState.CREATED),
     ("deactivating", "stop-sigterm", ObservedState.RUNNING),
     ("deactivating", "stop-post", ObservedState.RUNNING),
     ("reloading", "reload", ObservedState.RUNNING),
     ("activating", "auto-restart", ObservedState.RUNNING),
     ("inactive", "dead", ObservedState.EXITED)],
)  # fmt: skip
def test_unit_states_are_mapped(active: str, sub: str, state: ObservedState) -> None:
    assert state_of(active, sub) is state


@pytest.mark.parametrize(
    ("load", "active", "there"),
    [("loaded", "inactive", True), ("not-found", "inactive", False), ("not-found", "active", True),
     ("bad-setting", "active", True), ("bad-setting", "inactive", False)],
)  # fmt: skip
def test_a_unit_that_cannot_be_read_may_run_all_the_same(load, active, there) -> None:
    assert unit_exists(load, active) is there


@pytest.mark.parametrize(
    ("code", "status", "result", "exit_code", "oom"),
    [(1, 3, "exit-code", 3, False), (1, 0, "success", 0, False), (2, 9, "signal", 137, False),
     (2, 15, "success", 143, False), (2, 9, "oom-kill", 137, True),
     (3, 6, "core-dump", 134, False)],
)  # fmt: skip
def test_unit_end_is_parsed(code, status, result, exit_code, oom) -> None:
    seen = {"ExecMainCode": code, "ExecMainStatus": status, "Result": result,
            "ExecMainExitTimestamp": 2_000_000}  # fmt: skip
    ending = parse_end(seen).ending
    assert (ending.exit_code, ending.oom_killed, ending.finished_at) == (exit_code, oom, 2.0)


def run_drop_in(folder: Path, state: str, **environ: str) -> None:
    """Do what systemd does with the drop-in's command (systemd.service(5), "Command Lines").

    The kernel's variables are hostile: programs of its own, and a library for every loader.
    """
    require("busybox")
    busybox = static_busybox()
    evil = folder / "evil"
    evil.mkdir(exist_ok=True)
    for name in ("date", "mv", "systemctl", "timeout", "env", "printf", "cat", "stat"):
        (evil / name).write_text(f"#!/bin/sh\ntouch {folder}/taken\n")
        (evil / name).chmod(0o755)
    text = DROP_IN.format(
        prefix="agentd-x-", manager="--system", folder=f'"{folder}"', busybox=busybox
    )
    line = text.partition("ExecStopPost=+")[2].replace("\\\n", " ")
    line = line.replace("%n", "agentd-x-k1.service")
    line = line.replace("systemctl --system is-system-running", f"echo {state}")
    (evil / "own").write_text("0::/k1.service\n")
    line = line.replace("/proc/self/cgroup", f"{evil}/own")
    line = line.replace("/sys/fs/cgroup", f"{folder}/groups")
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]
    words[2] = words[2].replace("\\\\n", "\\n")
    hostile = {"PATH": str(evil), "LD_PRELOAD": str(evil / "x.so"), "ENV": str(evil / "date"),
               "BASH_ENV": str(evil / "date"), "IFS": "e", "TZ": str(evil / "fifo"),
               "n": "1", "g": str(evil)}  # fmt: skip
    if not (evil / "fifo").exists():
        os.mkfifo(evil / "fifo")  # opening it blocks forever
    done = subprocess.run(words, env={**hostile, **environ}, capture_output=True, check=True,
                          timeout=20)  # fmt: skip
    assert done.stderr == b"", "a loader complains of a library that is not there"
    assert not (folder / "taken").exists()


@pytest.mark.parametrize(
    ("code", "status", "state", "exit_code", "reason"),
    [("exited", "7", "running", 7, ""), ("killed", "TERM", "stopping", 143, "the node restarted"),
     ("dumped", "ABRT", "degraded", 134, ""), ("killed", "KILL", "stopping", 137,
     "the node restarted")],
)  # fmt: skip
def test_systemd_itself_writes_how_a_kernel_ended(
    tmp_path, code, status, state, exit_code, reason
) -> None:
    bundle = UnitBundle(tmp_path / "k1")
    bundle.create("{}", {})
    given_ = {"SERVICE_RESULT": "signal", "EXIT_CODE": code, "EXIT_STATUS": status}
    run_drop_in(tmp_path, state, **given_)
    end = bundle.read_end()
    assert end is not None
    assert (end.ending.exit_code, end.ending.reason) == (exit_code, reason)
    assert end.finished_at > 1_700_000_000
    run_drop_in(tmp_path, state, **{**given_, "EXIT_STATUS": "1"})
    assert bundle.read_end() == end, "what is written stays"


def test_usage_from_systemd_is_kept_unless_counted(tmp_path: Path) -> None:
    group = tmp_path / "groups" / "k1.service"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 2500000\nthrottled_usec 0\n")
    (group / "memory.peak").write_text("4096\n")
    bundle = UnitBundle(tmp_path / "k1")
    for own, cpu_seconds, peak in ((tmp_path, None, None), (group, 2.5, 4096)):
        bundle.create("{}", {})
        bundle.save_group(own)
        bundle.save_group(tmp_path / "another of that name, later")
        run_drop_in(tmp_path, "running", SERVICE_RESULT="success", EXIT_CODE="killed",
                    EXIT_STATUS="TERM")  # fmt: skip
        assert bundle.has_usage() is (cpu_seconds is not None)
        used = bundle.read_usage()
        assert (used.cpu_seconds, used.memory_peak_bytes) == (cpu_seconds, peak)
        assert used.memory_bytes is None
        bundle.save_usage(Usage(cpu_seconds=9.0, io_read_bytes=7))
        used = bundle.read_usage()
        assert (used.cpu_seconds, used.io_read_bytes) == (cpu_seconds or 9.0, 7)
        bundle.remove()


def test_a_unit_that_is_no_kernel_s_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="loader"):  # `cd` says that there is no such folder
        run_drop_in(tmp_path, "running", SERVICE_RESULT="success")
    assert {path.name for path in tmp_path.iterdir()} == {"evil"}


def test_a_program_with_a_loader_is_not_static(tmp_path: Path) -> None:
    assert static_busybox([sys.executable, "/etc/passwd", str(tmp_path / "none")]) is None


def test_a_cgroup_with_processes_lives_whatever_its_unit_says(tmp_path: Path) -> None:
    where = "/agentd.slice/k1.service"
    group = tmp_path / where[1:]
    for active, sub in (("failed", "failed"), ("active", "exited"), ("inactive", "dead")):
        assert state_of(active, sub, where, tmp_path) is ObservedState.EXITED
    group.mkdir(parents=True)
    for events, state in (
        ("populated 1\nfrozen 0\n", ObservedState.RUNNING),
        ("populated 1\nfrozen 1\n", ObservedState.PAUSED),
        ("populated 0\nfrozen 0\n", ObservedState.EXITED),
    ):
        (group / "cgroup.events").write_text(events)
        assert state_of("failed", "failed", where, tmp_path) is state
    assert state_of("failed", "failed", "", tmp_path) is ObservedState.EXITED


@pytest.mark.parametrize("mode", [0o770, 0o750, 0o700])
def test_bundle_that_others_can_write_is_no_absent_one(tmp_path: Path, mode: int) -> None:
    observer = UnitObserver(tmp_path, "n", "boot", SystemdManager(is_user=True))
    bundle = observer.bundle("k1")
    bundle.create(OWN, {})
    bundle.save_end(UnitEnd("exit-code", "exited", "3", 7.25))
    bundle.path.chmod(mode)
    gone = observer._observe_missing_unit("k1", bundle)
    assert gone is not None
    assert (gone.state, gone.is_unreadable) == (ObservedState.EXITED, mode == 0o770)
    assert gone.ending.exit_code == (None if mode == 0o770 else 3)
    assert ("has mode" in gone.record_problem) == (mode != 0o700)
    shutil.rmtree(bundle.path)
    assert observer._observe_missing_unit("k1", bundle) is None


@pytest.mark.parametrize(
    ("boot", "end", "reason"),
    [
        ("before", UnitEnd("signal", "killed", "TERM", 7.25, ""), "the node restarted"),
        ("before", UnitEnd("timeout", "killed", "KILL", 7.25, "unknown"), "the node restarted"),
        ("before", UnitEnd("signal", "killed", "TERM", 7.25, "running"), ""),
        ("before", UnitEnd("exit-code", "exited", "4", 7.25, ""), ""),
        ("boot", UnitEnd("signal", "killed", "TERM", 7.25, ""), ""),
    ],
    ids=["no-answer", "manager-gone", "by-hand", "by-itself", "same-boot"],
)
def test_a_power_off_whose_manager_did_not_answer_is_one(
    tmp_path: Path, boot: str, end: UnitEnd, reason: str
) -> None:
    observer = UnitObserver(tmp_path, "n", "boot", SystemdManager(is_user=True))
    bundle = observer.bundle("k1")
    bundle.create(OWN, {})
    bundle.save_identity(UnitIdentity("0" * 32, boot, 1.0))
    bundle.save_end(end)
    kernel = observer._observe_missing_unit("k1", bundle)
    assert kernel is not None
    assert (kernel.ending.reason, kernel.ending.finished_at) == (reason, 7.25)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\"\\$`'")))
def test_values_of_variables_survive_their_file(value: str) -> None:
    """As a shell reads double quotes, which systemd.exec(5) says are read alike."""
    assert shlex.split(f"A={quote_value(value)}") == [f"A={_unescaped(value)}"]


def _unescaped(value: str) -> str:
    """Resolve the escapes that shlex keeps: it knows only `\"` and `\\`."""
    return value.replace("$", "\\$").replace("`", "\\`")


def test_the_properties_close_what_a_kernel_was_not_given() -> None:
    node = DeviceNode("/dev/tpu0", "/dev/tpu0")
    edits = ContainerEdits(device_nodes=(node,), mounts=(Mount("/usr/lib/x", "/x"),), groups=("7",))
    limits = {"pids_limit": 9, "ulimits": {"nofile": {"soft": 5, "hard": -1}}}
    made = plan("sh", "-c", "echo $HOME", edits=edits, env={"SECRET": "s"}, options=limits)
    found = told(made)
    assert found["DynamicUser"] is True
    assert found["DevicePolicy"] == "closed"
    assert found["DeviceAllow"] == [["/dev/tpu0", "rw"]]
    assert found["BindReadOnlyPaths"] == [["/usr/lib/x", "/x", False, 16384]]
    assert found["ExitType"] == "cgroup"
    assert found["TasksMax"] == 9
    assert (found["LimitNOFILE"], found["LimitNOFILESoft"]) == (2**64 - 1, 5)
    assert found["ExecStart"] == [["sh", ["sh", "-c", "echo $$HOME"], False]]
    assert not [name for name in found if name.endswith("Ex")], "lost in a daemon-reload"
    assert "SECRET" not in str(found)
    default = {"nofile": 7, "core": {"soft": 0, "hard": 8}}
    with_default = told(made, default_ulimits=default)
    assert (with_default["LimitNOFILE"], with_default["LimitNOFILESoft"]) == (2**64 - 1, 5)
    assert (with_default["LimitCORE"], with_default["LimitCORESoft"]) == (8, 0)
    assert found["SupplementaryGroups"] == ["7"]
    named = told(made, UserAccounts(UserAccount("kernels", 1000, 1000, ())))
    assert named["User"] == "kernels"
    assert "DynamicUser" not in named
    assert told(made, stop_timeout=2.5)["TimeoutStopUSec"] == 2_500_000
    assert told(made, stop_timeout=0)["TimeoutStopUSec"] == 1, "0 would be no limit at all"


@pytest.mark.parametrize(
    ("requested", "default", "expected"),
    [
        (("nofile",), ("nofile",), "ulimits: cannot be set on this node"),
        (
            ("core",),
            ("nofile",),
            r"one of ulimits\.core, runtime\.systemd\.default-ulimits\.nofile$",
        ),
        ((), ("nofile",), r"one of runtime\.systemd\.default-ulimits\.nofile$"),
    ],
)
async def test_limit_that_cannot_be_set_names_its_setting(
    tmp_path: Path, requested: tuple[str, ...], default: tuple[str, ...], expected: str
) -> None:
    settings = SystemdSettings.model_validate({"default-ulimits": dict.fromkeys(default, 7)})
    runtime = SystemdRuntime(tmp_path, "n", "b", settings, UserAccounts(is_unprivileged=True))
    seen = {"Result": "resources", "ExecMainStatus": 205}
    runtime._manager = Mock(get_properties=AsyncMock(return_value=seen))
    limits = {name: {"soft": 7, "hard": 7} for name in requested}
    made = plan("true", options={"ulimits": limits})
    error = await runtime._start_error(made, "unit", "failed")
    assert isinstance(error, InvalidRequest) is expected.startswith("ulimits:")
    assert re.search(expected, str(error))


async def test_user_that_systemd_does_not_find_is_for_a_moment(tmp_path: Path) -> None:
    """agentd found it, and the name service is down since."""
    accounts = UserAccounts(UserAccount("team-ldap", 1000, 1000, ()))
    runtime = SystemdRuntime(tmp_path, "n", "b", SystemdSettings(), accounts)
    seen = {"Result": "exit-code", "ExecMainStatus": 217}
    runtime._manager = Mock(get_properties=AsyncMock(return_value=seen))
    error = await runtime._start_error(plan("true"), "unit", "failed")
    assert isinstance(error, NotReady)
    assert "status 217" in str(error)


async def test_start_that_takes_too_long_is_for_a_moment(tmp_path: Path) -> None:
    """The command, or its directory, is on a dead mount."""
    runtime = SystemdRuntime(tmp_path, "n", "b", SystemdSettings(), UserAccounts())
    seen = {"Result": "timeout", "ExecMainStatus": 0}
    runtime._manager = Mock(get_properties=AsyncMock(return_value=seen))
    error = await runtime._start_error(plan("true"), "unit", "failed")
    assert isinstance(error, RuntimeUnavailable)


def test_a_user_s_unit_has_only_what_a_user_s_manager_can_do() -> None:
    found = told(plan("true"), UserAccounts(is_unprivileged=True))
    assert not found.keys() & {"DynamicUser", "DevicePolicy", "LogNamespace", "AllowedMemoryNodes"}
    moved = ContainerEdits(mounts=(Mount("/a", "/b"),))
    with pytest.raises(RuntimeFailure):
        told(plan("true", edits=moved), UserAccounts(is_unprivileged=True))
    with pytest.raises(RuntimeFailure):
        told(plan("true", edits=ContainerEdits(cdi=("x",))))


@pytest.mark.parametrize(
    ("spec", "where"),
    [({"command": ()}, "command"), ({"command": ("./x",)}, "command.0"),
     ({"command": ("x", "a\0b")}, "command.1"), ({"env": {"A-B": "1"}}, "env.A-B"),
     ({"env": {"A": "\r"}}, "env.A"), ({"env": {"EXIT_STATUS": "0"}}, "env.EXIT_STATUS"),
     ({"user": "root"}, "user"),
     ({"options": {"pids_limit": 5000}}, "pids_limit")],
)  # fmt: skip
def test_request_that_no_unit_can_fulfil_is_refused(spec, where) -> None:
    given_ = {"command": ("true",), **spec}
    refused = KernelSpec("k", "a", spec_hash="h", **given_)
    problems = list(request_problems(refused, SystemdSettings(), None))
    assert [problem.where for problem in problems] == [where]
    fine = KernelSpec("k", "a", ("/bin/sh",), "h", env={"A_1": "x\ty\nz"})
    assert not list(request_problems(fine, SystemdSettings(), None))


def test_words_are_left_alone() -> None:
    assert escape_words(["${X}", "$$", "a"]) == ["$${X}", "$$$$", "a"]


def test_the_fence_holds_the_partition_and_what_lives() -> None:
    fence = agent_resource_cap("a", ("0", "1"), 100, frozenset({"0", "1", "2"}), Ledger())
    assert (fence.cores, fence.memory_bytes) == (("0", "1"), 100)
    declared = agent_resource_cap("a", ("0", "9"), 100, frozenset({"0"}), Ledger())
    assert declared.cores == (), "a core that is not there cannot be pinned"


@pytest.mark.parametrize(
    ("files", "said"),
    [((), "not PID 1"), (("run/systemd/system/x",), "D-Bus"),
     (("run/systemd/system/x", "run/dbus/system_bus_socket"), "cgroup v2")],
)  # fmt: skip
def test_a_machine_that_cannot_run_units_says_why(tmp_path, monkeypatch, files, said) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert said in systemd_problems(tmp_path)[0]


def test_versions_are_read() -> None:
    assert parse_version("systemd 252 (252.39-1~deb12u2)\n+PAM") == 252
    assert parse_version("") is None
    assert signal.SIGTERM == 15


def test_a_journal_that_has_failed_or_has_no_limits_is_told(tmp_path: Path) -> None:
    for namespace in ("agentd-a", "agentd-b", "agentd-c", "other"):
        (tmp_path / f"run/systemd/journal.{namespace}").mkdir(parents=True)
    for namespace in ("agentd-a", "agentd-b"):
        limits = tmp_path / f"run/systemd/journald@{namespace}.conf.d/10-agentd.conf"
        limits.parent.mkdir()
        limits.touch()
    failed = {"systemd-journald@agentd-b.service", "systemd-journald@other.service"}
    found = [*map(str, journal_conditions(failed, tmp_path))]
    assert [remark.partition(":")[0] for remark in found] == [
        "systemd-journald@agentd-b.service has failed", "the journal agentd-c has no limits",
    ]  # fmt: skip
