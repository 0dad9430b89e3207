"""Slurm's commands: where they are found, and how long slurmctld is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentd_slurm import controller
from agentd_slurm.controller import ControllerUnavailable, SlurmFailed
from agentd_slurm.slurm_conf import NO_LIMIT_S, prolog_timeout_s


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file, which is not there at first."""
    monkeypatch.setenv("AGENTD_SLURM_SETTINGS", str(tmp_path / "slurm.toml"))
    return tmp_path / "slurm.toml"


def program(folder: Path, text: str = "true") -> str:
    """Write a command of Slurm and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "scontrol").chmod(0o755)
    return str(folder / "scontrol")


def test_program_is_where_the_settings_say(settings: Path, tmp_path: Path) -> None:
    wanted = program(tmp_path / "site")
    settings.write_text(f'[slurm]\nbin = "{tmp_path}/site"\n')
    assert controller.find_program("scontrol") == wanted
    settings.write_text(f'[slurm]\nbin = "{tmp_path}"\n')
    with pytest.raises(SlurmFailed, match=f"scontrol not found in {tmp_path}$"):
        controller.find_program("scontrol")
    settings.write_text("[slurm]\nbins = 1\n")
    with pytest.raises(SlurmFailed, match="unknown key"):
        controller.find_program("scontrol")


@pytest.mark.parametrize("name", ["slurmd", "slurmd-wlm", "slurmstepd"])
def test_program_of_the_slurmd_that_runs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is the parent of a prolog, and its commands are beside its folder."""
    wanted = program(tmp_path / "bin")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "exe").symlink_to(tmp_path / "sbin" / name)
    real, own = Path, os.getpid()
    monkeypatch.setattr(controller, "_own_ancestors_and_others", lambda: iter([own]))
    monkeypatch.setattr(controller, "read_uids", lambda _: {0})
    monkeypatch.setattr(
        controller, "Path", lambda path: proc / "exe" if str(path).endswith("exe") else real(path)
    )
    assert controller.find_program("scontrol") == wanted
    monkeypatch.setattr(controller, "read_uids", lambda _: {0, 7})
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert controller.find_program("scontrol") != wanted


def test_ancestors_are_looked_at_first() -> None:
    pids = controller._own_ancestors_and_others()
    assert next(pids) == os.getppid()
    assert os.getpid() in pids


@pytest.mark.parametrize(
    "reason",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "Unexpected message received for job 1",
    ],
)
def test_absent_slurmctld_is_asked_until_the_deadline(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    program(tmp_path / "site", f"echo '{reason}' >&2; exit 1")
    settings.write_text(f'[slurm]\nbin = "{tmp_path}/site"\n')
    clock = fake_clock(monkeypatch)
    with pytest.raises(ControllerUnavailable):
        controller.until_answered(lambda: controller.run_command("scontrol"), 5.0)
    assert next(clock) == 5.0


def test_other_failures_of_slurm_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_clock(monkeypatch)

    def fail() -> None:
        raise SlurmFailed("Invalid job id specified")

    with pytest.raises(SlurmFailed, match="Invalid"):
        controller.until_answered(fail, 5.0)
    assert next(clock) == 0.0


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Make each pause pass at once and return the clock."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=pause)
    monkeypatch.setattr(controller, "time", clock)
    return iter(lambda: now[0], None)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", NO_LIMIT_S),
        ("PrologEpilogTimeout=0", NO_LIMIT_S),
        ("PrologEpilogTimeout=65534", NO_LIMIT_S),
        ("prologepilogtimeout = 60 # s", 60),
        ("#PrologEpilogTimeout=60", NO_LIMIT_S),
        ("MessageTimeout=10 PrologEpilogTimeout=90", 90),
        ("PrologEpilogTimeout=60\nPrologEpilogTimeout=70", 70),
        ("include more.conf", 45),
        ("PrologEpilogTimeout=60\nInclude {folder}/more.conf", 45),
        ("Include slurm.conf\nPrologEpilogTimeout=20", 20),
        ("Include none.conf", NO_LIMIT_S),
    ],
)
def test_time_of_a_prolog_is_read_from_slurm_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: int
) -> None:
    (tmp_path / "slurm.conf").write_text(text.format(folder=tmp_path))
    (tmp_path / "more.conf").write_bytes(b"# \xff\nPrologEpilogTimeout=45\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert prolog_timeout_s() == wanted
