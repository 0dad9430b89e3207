"""Names of a host whose name service fails, errno by errno; only "not found" makes one unknown."""

import errno
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.host.user_accounts import find_account
from native.libraries import built

FAILURES = (
    *("ENOMEM", "EMFILE", "ENFILE", "EIO", "EAGAIN", "EINTR", "EACCES", "EPERM", "EBADF"),
    *("ECONNREFUSED", "ETIMEDOUT", "EHOSTUNREACH", "ENOENT", "ESRCH"),
)
LOOK_UP = """
import json, sys
from agentd.errors import RuntimeUnavailable
from agentd.host.groups import find_group_id
from agentd.runtimes.host.user_accounts import find_account
def answer(find, name):
    try:
        return find(name)
    except RuntimeUnavailable as error:
        return str(error)
print(json.dumps({n: [answer(find_account, n), answer(find_group_id, n)] for n in sys.argv[1:]}))
"""
WITHOUT_DESCRIPTORS = """
import os, resource, sys
from agentd.runtimes.host.user_accounts import find_account
find_account("no-such-user")  # every service of nsswitch.conf(5) is loaded
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    print(find_account("daemon"))
except Exception as error:
    os.closerange(taken[0], 40)
    print(error)
"""


def printed(program: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.check_output(command, env={**os.environ, **environ}, text=True)


@pytest.mark.needs("gcc")
def test_failed_lookup_makes_no_name_unknown(tmp_path: Path) -> None:
    for name in FAILURES:
        (tmp_path / f"{name}.fails").write_text(str(getattr(errno, name)))
    library = str(built("silent.c", tmp_path / "silent.so"))
    text = printed(LOOK_UP, *FAILURES, LD_PRELOAD=library, HANGING=str(tmp_path))
    answers: dict[str, Any] = json.loads(text)
    for name in FAILURES:
        why = f"the name service does not answer: {os.strerror(getattr(errno, name))}"
        assert answers[name] == [why, why], name


def test_lack_of_descriptors_makes_no_name_unknown() -> None:
    """The C library would skip its files, and another service knows only its own names."""
    text = printed(WITHOUT_DESCRIPTORS)
    assert text == f"the name service does not answer: /etc/passwd: {os.strerror(errno.EMFILE)}\n"


def test_account_without_its_groups_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """getgrouplist(3) reports no failure; one of its own files that cannot be read does."""
    real = Path.open

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if str(path) == "/etc/group":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *args, **kwargs)

    assert find_account(pwd.getpwuid(0).pw_name) is not None
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(RuntimeUnavailable, match="/etc/group: Input/output error"):
        find_account(pwd.getpwuid(0).pw_name)
