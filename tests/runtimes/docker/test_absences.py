"""Ends during an engine's absence are told apart from other ends."""

import time
from pathlib import Path

import pytest

from agentd.core.kernel.states import Ending
from agentd.runtimes.docker.absences import ENGINE, NODE, Absences


def reason(
    absences: Absences, finished_s: float, started_s: float = -1000.0, exit_code: int = 0
) -> str:
    """The reason of a container that ended so many seconds after now."""
    now = time.time()
    ending = Ending(exit_code, finished_at=now + finished_s)
    return absences.explained("k1", ending, now + started_s).reason


def test_an_end_before_or_after_an_absence_has_no_reason(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    assert reason(absences, 0) == ""
    absences.went(ends_kernels=True)
    absences.came()
    assert reason(absences, 0) == ENGINE
    assert reason(absences, -60) == ""
    assert reason(absences, 60) == ""
    assert (
        absences.explained("k1", Ending(reason="own", finished_at=time.time()), 0).reason == "own"
    )
    assert absences.explained("k1", Ending(), 0) == Ending()


def test_an_engine_that_restores_its_containers_ends_none(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    absences.went(ends_kernels=False)
    absences.came()
    assert reason(absences, 0) == ""


def test_absence_is_known_after_a_daemon_crash(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    absences.went(ends_kernels=True)
    after = Absences(tmp_path / "a.json", "boot")
    after.came()
    assert reason(after, 0) == ENGINE


def test_a_signal_to_one_kernel_says_nothing_of_another(tmp_path: Path, monkeypatch) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 20)
    absences.signalled("k2")
    monkeypatch.undo()
    absences.went(ends_kernels=True)
    absences.came()
    assert reason(absences, -10) == ""
    assert absences.explained("k2", Ending(0, finished_at=now - 10), now - 99).reason == ENGINE


@pytest.mark.parametrize("is_asked", [True, False])
def test_unrequested_signals_begin_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 10)
    if is_asked:
        with absences.asked("k1"):
            absences.signalled("k1")
    else:
        absences.signalled("k1")
    monkeypatch.undo()
    absences.went(ends_kernels=True)
    absences.came()
    assert reason(absences, -9) == ("" if is_asked else ENGINE)


def test_absences_outlive_the_daemon(tmp_path: Path) -> None:
    absences = Absences(tmp_path / "a.json", "boot")
    absences.came()
    absences.went(ends_kernels=True)
    absences.came()
    absences.close()
    assert reason(Absences(tmp_path / "a.json", "boot"), 0) == ENGINE


def test_a_new_boot_is_an_absence_of_the_node(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    Absences(file, "boot 1").close()
    after = Absences(file, "boot 2")
    assert reason(after, 0) == ""
    after.came()
    assert reason(after, 0) == NODE
    assert reason(after, 0, started_s=1) == "", "it was started after the boot"
    assert reason(after, -60) == "", "it had ended before agentd stopped looking"
    assert reason(after, -4, exit_code=143) == NODE, "systemd ended both at once"
    assert reason(after, -4, exit_code=3) == reason(after, -60, exit_code=143) == ""


@pytest.mark.parametrize(("stopped_s", "wanted"), [(5, NODE), (3600, ENGINE)])
def test_an_engine_that_stops_before_its_host_is_told_apart(
    tmp_path: Path, monkeypatch, stopped_s: int, wanted: str
) -> None:
    """It goes down with its host, or an operator stopped it long before that."""
    file = tmp_path / "a.json"
    before = Absences(file, "boot 1")
    before.came()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - stopped_s - 3)
    before.signalled("k1")
    monkeypatch.setattr(time, "time", lambda: now - stopped_s)
    before.went(ends_kernels=True)
    monkeypatch.undo()
    before.close()
    after = Absences(file, "boot 2")
    after.came()
    assert reason(after, -stopped_s - 2, started_s=-9000) == wanted
    assert reason(after, -stopped_s + 1, started_s=-9000) == wanted
    assert reason(after, 0, started_s=-9000) == NODE


def test_signals_shortly_before_a_boot_are_the_hosts(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.json"
    before = Absences(file, "boot 1")
    before.came()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 20)
    before.signalled("k1")
    monkeypatch.undo()
    before.close()
    after = Absences(file, "boot 2")
    after.came()
    assert reason(after, -19) == NODE
    restarted = Absences(file, "boot 2")
    assert reason(restarted, -19) == NODE


def test_a_file_that_cannot_be_read_knows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("{")
    absences = Absences(file, "boot")
    absences.came()
    assert reason(absences, 0) == ""
