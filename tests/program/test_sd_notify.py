import errno
import socket
from pathlib import Path

import pytest

from agentd.program.sd_notify import Notifier


def test_a_manager_that_does_not_listen_is_no_harm(tmp_path: Path) -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready("x")
    assert Notifier({"WATCHDOG_USEC": "2000000"}).watchdog_s == 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "deaf")})
        for number in range(1000):  # more than its queue takes
            notifier.status(f"{number}")
    assert Notifier({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}).watchdog_s is None


def test_a_notice_without_a_descriptor_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("agentd.program.sd_notify.socket.socket", refuse)
    Notifier({"NOTIFY_SOCKET": "/run/none"}).alive()
