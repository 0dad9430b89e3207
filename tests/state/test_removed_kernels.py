"""The places of removed kernels, over restarts and damage."""

import os
from pathlib import Path

import pytest

from agentd.core.kernel.states import RemovedKernel
from agentd.state import removed_kernels
from agentd.state.removed_kernels import RemovedKernelsFile


def place(number: int) -> RemovedKernel:
    return RemovedKernel(number / 7, f"k{number}", "agent-1")


def test_places_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "removed.jsonl"
    assert RemovedKernelsFile(path).load() == []
    written = RemovedKernelsFile(path)
    written.add(place(1))
    written.add(place(2))
    assert RemovedKernelsFile(path).load() == [place(1), place(2)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_latest_places_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed_kernels, "MOST_KEPT", 10)
    path = tmp_path / "removed.jsonl"
    written = RemovedKernelsFile(path)
    for number in range(95):
        written.add(place(number))
        assert len(path.read_bytes().splitlines()) <= 20
    assert RemovedKernelsFile(path).load() == [place(number) for number in range(85, 95)]
    assert [*tmp_path.iterdir()] == [path]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "removed.jsonl"
    written = RemovedKernelsFile(path)
    written.add(place(1))
    with path.open("ab") as file:
        file.write(b"\xff\x00\n[1]\n{}\n\n" + b"[" * 5000 + b"\n")
    written.add(place(2))
    assert RemovedKernelsFile(path).load() == [place(1), place(2)]


def test_what_is_not_a_file_is_left_alone(tmp_path: Path) -> None:
    for name, make in (("fifo", os.mkfifo), ("folder", os.mkdir)):
        path = tmp_path / name
        make(path)
        written = RemovedKernelsFile(path)
        written.add(place(1))
        assert written.load() == []
        assert path.exists()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    RemovedKernelsFile(link).add(place(1))
    assert not (tmp_path / "elsewhere").exists()
