"""Groups that a request adds to a process kernel, through the RPC."""

import grp
import os

import pytest

from end_to_end.containers import printed
from support.daemon import AGENTS, Daemon, gpus

GROUPS = '[runtime.process]\nallowed-groups = ["daemon", 2000, "nosuch"]\n'
DAEMON = grp.getgrnam("daemon").gr_gid


@pytest.mark.needs("root")
async def test_groups_of_a_process_are_those_asked_for(plain: Daemon) -> None:
    await plain.start(AGENTS + gpus() + GROUPS)
    usual = {*map(int, (await printed(plain, "id -G")).split())}
    asked = {*map(int, (await printed(plain, "id -G", groups=[2000, "daemon"])).split())}
    assert asked == usual | {2000, DAEMON}
    answer = await plain.create(groups=["root", "docker", 2000], slots={"cuda.device": 1})
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
    assert answer.json["errors"] == [
        {
            "where": f"groups.{n}",
            "why": f"group '{name}' is not allowed; allowed-groups: daemon, 2000, nosuch",
        }
        for n, name in enumerate(("root", "docker"))
    ]
    later = await plain.create(groups=["nosuch"], slots={"cuda.device": 1})
    assert (later.status, later.json["code"]) == (503, "NotReady")
    assert "Retry-After" in later.headers
    assert "group 'nosuch' of allowed-groups does not exist" in later.json["detail"]
    assert await plain.free("cuda.device") == "2"


@pytest.mark.parametrize(
    ("members", "where", "why"),
    [
        ({"groups": [-1]}, "groups.0", "expected the name of a group, or its number from 0"),
        ({"groups": [1.0]}, "groups.0", "expected the name of a group"),
        ({"groups": [None]}, "groups.0", "expected the name of a group"),
        ({"groups": ["a\0"]}, "groups.0", "expected the name of a group"),
        ({"groups": "daemon"}, "groups", "expected a list"),
        ({"groups": [1] * 65}, "groups", "at most 64"),
        ({"init": True}, "init", "the process runtime, which reaps ended processes already"),
        ({"init": 1}, "init", "expected true or false"),
        ({"entrypoint": []}, "entrypoint", "the process runtime, which uses no image"),
        ({"entrypoint": ["a\0"]}, "entrypoint.0", "expected text without NUL"),
        ({"entrypoint": [""]}, "entrypoint", "expected a non-empty first word"),
        ({"entrypoint": ["x" * 4096]}, "entrypoint", "the first word is longer than 4095"),
        (
            {"entrypoint": ["x" * 4000] * 3, "command": ["a", *["y" * 20000] * 6]},
            "entrypoint",
            "132001 bytes in all words exceed the limit of 131072",
        ),
    ],
)
async def test_invalid_members_are_named(plain: Daemon, members, where: str, why: str) -> None:
    await plain.start()
    answer = await plain.create(**members)
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest"), answer
    (problem,) = answer.json["errors"]
    assert problem["where"] == where
    assert why in problem["why"]


async def test_false_and_null_are_as_if_not_given(plain: Daemon) -> None:
    await plain.start()
    body = {"kernel_id": "k1", "command": ["sleep", "1000"]}
    assert (await plain.create(**body)).status == 201
    again = await plain.create(**body, init=False, groups=[], entrypoint=None)
    assert again.status == 200
    if os.geteuid() == 0:
        other = await plain.create(**body, groups=[0])
        assert (other.status, other.json["code"]) == (409, "KernelConflict")
