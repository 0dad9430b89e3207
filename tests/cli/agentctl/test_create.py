"""`agentctl create`: the body that its options make, and the end of one that is interrupted."""

import asyncio
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from agentd.cli.agentctl.create import create, kernel_body
from agentd.rpc.requests import CreateKernelRequest
from support.daemon import Daemon
from support.scripted_node import BIN, Agentctl, ScriptedNode


@pytest.mark.parametrize(
    ("words", "members"),
    [
        ([], {}),
        (["--init"], {"init": True}),
        (["--group", "2000", "--group", "video"], {"groups": ["2000", "video"]}),
        (["--entrypoint", ""], {"entrypoint": []}),
        (["--entrypoint", "/bin/sh"], {"entrypoint": ["/bin/sh"]}),
        (["-p", "80"], {"ports": [{"container": 80, "protocol": "tcp"}]}),
        (["-p", "8080:53/udp"], {"ports": [{"container": 53, "protocol": "udp", "host": 8080}]}),
        (["--mount", "/a:/b"], {"mounts": [{"source": "/a", "target": "/b", "read_only": True}]}),
        (
            ["--mount", "/a:/b:rw"],
            {"mounts": [{"source": "/a", "target": "/b", "read_only": False}]},
        ),
        (["--tmpfs", "/t"], {"tmpfs": [{"target": "/t"}]}),
        (["--tmpfs", "/t:64m"], {"tmpfs": [{"target": "/t", "size": "64m"}]}),
        (["--ulimit", "core=-1"], {"ulimits": {"core": {"soft": -1, "hard": -1}}}),
        (["--ulimit", "core=1:2"], {"ulimits": {"core": {"soft": 1, "hard": 2}}}),
    ],
)
def test_options_make_the_members_of_a_create(words: list[str], members: dict[str, Any]) -> None:
    with create.make_context("create", ["a", *words, "--", "x", "--init"]) as context:
        body = kernel_body(context.params)
    assert body == {"command": ["x", "--init"], **members}
    CreateKernelRequest.model_validate(body)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_interrupted_create_names_its_kernel(folder: Path, number: signal.Signals) -> None:
    node = ScriptedNode()
    async with node.serving(folder):
        creating = Agentctl(folder, "create", "agent-1", "--", "true")
        async with asyncio.timeout(20):
            await node.created.wait()
        creating.send(number)
        done = await creating.done()
    name = node.body["kernel_id"]
    text = f"agentctl: interrupted; kernel {name} may be created all the same: agentctl rm {name}\n"
    assert done == (128 + number, "", text)
    assert node.calls == ["create"]


async def test_create_of_a_known_id_is_a_conflict_with_its_remedy(up: Daemon) -> None:
    words = ("create", "agent-1", "--id", "nightly", "-o", "name", "--", "sleep", "1000")
    assert await Agentctl(up.folder, *words).done() == (0, "nightly\n", "")
    done = await Agentctl(up.folder, *words).done()
    assert (done.status, "KernelConflict: " in done.stderr) == (1, True)
    assert "another attempt created it" in done.stderr


async def test_interrupted_create_leaves_the_terminal_as_it_was(folder: Path) -> None:
    node, shown = ScriptedNode(), b""
    ours, theirs = pty.openpty()
    words = ("--socket", folder / "agentd.sock", "create", "agent-1", "--id", "k1", "--", "true")
    async with node.serving(folder):
        process = subprocess.Popen(
            [BIN / "agentctl", *words], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        while b"\x1b[?25l" not in shown:  # the cursor is hidden while there is a bar
            shown += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 40) == 143
    while not re.search(rb"agentctl rm k1\s", shown):
        shown += await asyncio.to_thread(os.read, ours, 65536)
    os.close(ours)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("-p", value)
            for value in (":80", "80:", "80/", "8_0", "٣", "-1", "a", "1:2:3", "9" * 9)
        ),
        *(("--mount", value) for value in ("/a", ":/b", "/a:", "/a:/b:", "/a:/b:x", "/a:/b:rw:")),
        *(("--tmpfs", value) for value in (":1m", "/t:", "/t:1m:x")),
        *(
            ("--ulimit", value)
            for value in ("core", "core=", "core=1:", "core=:1", "core=1_0", "=1")
        ),
        *(("--env", value) for value in ("A", "=b")),
        *(("-s", value) for value in ("cpu", "=1")),
    ],
)
def test_value_with_an_empty_part_is_wrong_usage(option: str, value: str) -> None:
    """A shell leaves the part out for a variable that is not set: `-p $PORT:80`."""
    with (
        create.make_context("create", ["a", option, value]) as context,
        pytest.raises(click.UsageError, match=r"invalid value .*: expected "),
    ):
        kernel_body(context.params)
