from __future__ import annotations

from pathlib import Path

import pytest

from agentd_slurm.processes import find_processes, jobs_in_cgroup


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("6:freezer:/slurm/uid_0/job_12/step_batch", {12}),
        ("6:freezer:/slurm_n1/uid_0/job_12/step_batch", {12}),
        ("6:freezer:/slurm_n2/uid_0/job_12/step_batch", set()),
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", {12}),
        ("0::/system.slice/n1_slurmstepd.scope/job_12/step_0", {12}),
        ("0::/system.slice/n2_slurmstepd.scope/job_12/step_0", set()),
        ("0::/user.slice/job_12", set()),
        ("0::/user.slice/user-7.slice/user@7.service/slurmstepd.scope/job_12", set()),
        ("1:name=systemd:/user.slice/user-7.slice/x/slurm/uid_0/job_12", set()),
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/user.slice", {12}),
        ("6:freezer:/docker/1/slurm/uid_0/job_12", {12}),
        ("6:freezer:/x/slurmstepd.scope/step_1/job_12", set()),
        ("6:freezer:/slurm/uid_0", set()),
    ],
)
def test_cgroup_names_its_job(line: str, wanted: set[int]) -> None:
    assert jobs_in_cgroup(["9:pids:/", line], "n1") == wanted


def process(
    proc: Path, pid: int, program: str, cmdline: str, cgroup: str = "0::/", uids: str = "0 0 0 0"
) -> None:
    (proc / f"{pid}").mkdir(parents=True)
    texts = {"comm": "slurmstepd", "cmdline": cmdline, "cgroup": cgroup, "status": f"Uid: {uids}"}
    for name, text in texts.items():
        (proc / f"{pid}" / name).write_text(text)
    (proc / f"{pid}" / "exe").symlink_to(f"/usr/sbin/{program}")


def test_processes_are_found_by_cgroup_and_by_stepd(tmp_path: Path) -> None:
    process(tmp_path, 10, "sleep", "sleep", "6:freezer:/slurm/uid_0/job_3/step_batch")
    process(tmp_path, 11, "slurmstepd", "slurmstepd: [4.batch]")
    process(tmp_path, 12, "sh", "slurmstepd: [5.batch]")
    process(tmp_path, 14, "slurmstepd", "slurmstepd: [6.batch]", "6:freezer:/slurm_n1/uid_0/job_6")
    process(tmp_path, 15, "slurmstepd", "slurmstepd: [7.batch]", "6:freezer:/slurm_n2/uid_0/job_7")
    process(tmp_path, 16, "slurmstepd", "", "0::/system.slice/n2_slurmstepd.scope/job_8")
    process(tmp_path, 17, "slurmstepd-wlm (deleted)", "slurmstepd: [9.batch]")
    (tmp_path / "self").mkdir()
    (tmp_path / "13").mkdir()
    jobs = range(3, 10)
    found = find_processes("n1", tmp_path)
    assert [job for job in jobs if found.may_have(job)] == [3, 4, 6, 9]


@pytest.mark.parametrize("uids", ["7 7 7 7", "7 0 0 0", "0 0 0 7"])
def test_process_of_a_user_is_no_stepd_of_a_job(tmp_path: Path, uids: str) -> None:
    process(tmp_path, 12, "slurmstepd", "slurmstepd: [5.batch]", uids=uids)
    process(tmp_path, 13, "slurmstepd", "slurmstepd", uids=uids)
    assert not find_processes("n1", tmp_path).may_have(5)


@pytest.mark.parametrize("name", [b"\xff\n", "12345678901234é".encode()[:15] + b"\n"])
def test_names_of_others_hide_no_job(tmp_path: Path, name: bytes) -> None:
    process(tmp_path, 9, "sh", "")
    (tmp_path / "9/comm").write_bytes(name)
    (tmp_path / "9/cgroup").write_bytes(b"0::/user.slice/\xff\r\x85/job_5\n")
    process(tmp_path, 10, "slurmstepd", "slurmstepd: [4.batch]")
    assert find_processes("n1", tmp_path).jobs == {4}


def test_stepd_that_keeps_the_scope_alive_is_of_no_job(tmp_path: Path) -> None:
    scope = "0::/system.slice/slurmstepd.scope/system"
    process(tmp_path, 11, "slurmstepd", "/usr/sbin/slurmstepd\0infinity", f"{scope}\n")
    assert not find_processes("n1", tmp_path).may_have(99)


def test_stepd_without_a_title_may_be_of_any_job(tmp_path: Path) -> None:
    process(tmp_path, 11, "slurmstepd", "/usr/sbin/slurmstepd")
    assert find_processes("n1", tmp_path).may_have(99)
