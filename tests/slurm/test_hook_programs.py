"""The shell programs that Slurm runs: when an interpreter starts, and what its status means."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.needs import ROOT

PROGRAMS = ("prolog", "epilog", "task-prolog")
JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
GPU = JOB | {"SLURM_JOB_GPUS": "0"}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a program by a link to it, with a stand-in for the interpreter beside the program."""
    folder, links = tmp_path / "bin", tmp_path / "prolog.d"
    folder.mkdir()
    links.mkdir()
    for name in PROGRAMS:
        shutil.copy(ROOT / f"engines/slurm/bin/agentd-slurm-{name}", folder)
        (links / name).symlink_to(folder / f"agentd-slurm-{name}")
    (folder / "python").write_text(
        f'#!/bin/sh\necho "$3 PYTHONHOME=$PYTHONHOME" >>{tmp_path}/asked\n'
        f"echo export A=1\n/bin/sleep ${{DELAY:-0}}\nexit ${{STATUS:-0}}\n"
    )
    (folder / "python").chmod(0o755)

    def start_program(name: str, **environ: str) -> subprocess.Popen[str]:
        env = {"AGENTD_SLURM_RUN": str(tmp_path / "run"), **environ}
        return subprocess.Popen([links / name], env=env, stdout=subprocess.PIPE, text=True)

    return start_program


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.strip()


def asked(folder: Path) -> list[str]:
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("name", PROGRAMS)
def test_job_without_gpus_starts_no_interpreter(start: Start, name: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert ended(start(name, **JOB)) == (0, "")
    assert asked(tmp_path) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_job_with_gpus_starts_a_clean_interpreter(start: Start, name: str, tmp_path: Path) -> None:
    assert ended(start(name, **GPU, PYTHONHOME="/none", PYTHONPATH="/none")) == (0, "export A=1")
    module = name.replace("-", "_")
    wanted = f"from agentd_slurm.commands.{module} import main; main() PYTHONHOME="
    assert asked(tmp_path) == [wanted]


def test_epilog_without_gpus_follows_the_mark(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "7").touch()
    assert ended(start("epilog", **JOB | {"SLURM_JOB_ID": "8"})) == (0, "")
    assert asked(tmp_path) == []
    assert ended(start("epilog", **JOB)) == (0, "export A=1")


@pytest.mark.parametrize("variable", ["SLURM_STEP_GPUS", "SLURM_SHARDS_ON_NODE"])
@pytest.mark.parametrize(("status", "wanted"), [(0, 0), (1, 0), (2, 0), (3, 3), (127, 0), (139, 0)])
def test_task_prolog_stops_only_a_refused_task(
    start: Start, variable: str, status: int, wanted: int
) -> None:
    process = start("task-prolog", **JOB, **{variable: "1"}, STATUS=str(status))
    assert ended(process) == (wanted, "export A=1")


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_status_of_a_prolog_is_slurms(start: Start, name: str) -> None:
    assert ended(start(name, **GPU, STATUS="1"))[0] == 1


STEP = GPU | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "32"}


@pytest.mark.parametrize(("status", "wanted"), [("0", 0), ("3", 3)])
def test_tasks_of_a_step_ask_once(start: Start, status: str, wanted: int, tmp_path: Path) -> None:
    job = STEP | {"SLURM_JOB_ID": f"{os.getpid()}{status}", "STATUS": status, "DELAY": "0.3"}
    try:
        for gpus in ("0", "1"):
            tasks = [start("task-prolog", **job, SLURM_STEP_GPUS=gpus) for _ in range(8)]
            assert {*map(ended, tasks)} == {(wanted, "export A=1")}
        assert len(asked(tmp_path)) == 2
    finally:
        assert ended(start("epilog", **job | {"STATUS": "0"}))[0] == 0
    assert [*Path("/tmp").glob(f"agentd-slurm-{job['SLURM_JOB_ID']}.*")] == []


@pytest.mark.parametrize("content", ["export A=2\nstatus 0\n", "export A=2\n", ""])
def test_answer_of_somebody_else_is_not_taken(start: Start, content: str, tmp_path: Path) -> None:
    job = STEP | {"SLURM_JOB_ID": f"{os.getpid()}9", "SLURM_STEP_GPUS": "0", "STATUS": "3"}
    file = Path(f"/tmp/agentd-slurm-{job['SLURM_JOB_ID']}.0.{os.getppid()}.0")
    (tmp_path / "lie").write_text(content)
    file.symlink_to(tmp_path / "lie")
    try:
        assert ended(start("task-prolog", **job)) == (3, "export A=1")
        assert (tmp_path / "lie").read_text() == content
    finally:
        file.unlink()
