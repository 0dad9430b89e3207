"""A balancer cuts the connection of a create: agentctl repeats it, or names the kernel."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentd.cli.agentctl import options
from agentd.cli.agentctl.main import agentctl
from agentd.client import AsyncClient, Client, creates
from agentd.errors import AnswerLost, Unavailable, Unreachable

CUT, RESET = "cut", "reset"
COMMANDS = {
    "node": ("--url", ["create", "agent-1", "--", "true"]),
    "fleet": ("--fleet", ["create", "--", "true"]),
}


def problem(code: str, status: int) -> tuple[int, dict[str, Any]]:
    return status, {"code": code, "detail": f"it is {code}", "status": status}


def kernel(name: str) -> dict[str, Any]:
    members = ("image", "command", "reason", "created_at", "started_at", "ended_at", "exit_code")
    row: dict[str, Any] = dict.fromkeys(members)
    row |= {"kernel_id": name, "agent_id": "agent-1", "node_id": "n", "state": "running"}
    return row | {"slots": {}, "allocation": {}, "degraded": [], "labels": {}, "created_by": "x"}


class Balancer:
    """Answers creates by a script, whose last step is repeated; keeps their ids."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps
        self.ids: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.ids.append(json.loads(await reader.readexactly(length))["kernel_id"])
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if step == RESET:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        elif step != CUT:
            status, content = (200, kernel(self.ids[-1])) if step == "done" else step
            body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
            writer.write(body)
        writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            self.url = f"http://{host}:{port}"
            yield


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give up sooner than people do."""
    monkeypatch.setattr(creates, "RETRY_S", 0.02)
    monkeypatch.setattr(
        options, "Client", lambda *args, **settings: Client(*args, **settings | {"timeout_s": 1.0})
    )
    monkeypatch.setattr(Unavailable, "retry_after_s", 0.02)
    return


async def created(kind: str, url: str, *options: str) -> Result:
    option, (command, *words) = COMMANDS[kind]
    arguments = [option, url, command, *options, *words]
    return await asyncio.to_thread(CliRunner().invoke, agentctl, arguments)


REPEATED = {
    "a cut": [CUT, "done"],
    "a reset": [RESET, "done"],
    "three cuts": [CUT, RESET, CUT, "done"],
    "a balancer without an answer": [(504, "<html>"), (502, "<html>"), "done"],
    "a balancer without a node, after a cut": [CUT, (503, "<html>"), "done"],
    "a gateway that does not know": [problem("OutcomeUnknown", 503), "done"],
    "a cut by a gateway that restarts": [CUT, problem("NotReady", 503), "done"],
}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("steps", REPEATED.values(), ids=REPEATED)
async def test_create_is_repeated_with_its_id_after(steps: list[Any], kind: str) -> None:
    balancer = Balancer(list(steps))
    async with balancer.serving():
        done = await created(kind, balancer.url, "-o", "name")
    assert done.exit_code == 0, done.output
    assert (len(balancer.ids), {*balancer.ids}) == (len(steps), {done.stdout.strip()})


@pytest.mark.parametrize("kind", COMMANDS)
async def test_create_that_stays_cut_names_its_kernel(kind: str) -> None:
    balancer = Balancer([CUT])
    async with balancer.serving():
        done = await created(kind, balancer.url)
        told = await created(kind, balancer.url, "-o", "json", "--id", "k1")
    assert (done.exit_code, len(balancer.ids) > 2) == (1, True), done.output
    assert f"kernel {balancer.ids[0]} may exist\n" in done.output
    assert f"agentctl inspect {balancer.ids[0]}" in done.output
    content = json.loads(told.output)
    assert (told.exit_code, content["code"], content["kernel_id"]) == (1, "Unreachable", "k1")


FINAL = {
    "a refusal": ([problem("KernelConflict", 409)], 1),
    "a moment": ([problem("NotReady", 503)], 1),
    "a refusal after a cut": ([CUT, problem("KernelConflict", 409)], 2),
}


@pytest.mark.parametrize(("steps", "count"), FINAL.values(), ids=FINAL)
async def test_create_ends_with(steps: list[Any], count: int) -> None:
    balancer = Balancer(list(steps))
    async with balancer.serving():
        done = await created("fleet", balancer.url)
    assert (done.exit_code, len(balancer.ids)) == (1, count), done.output
    assert steps[-1][1]["code"] in done.output
    assert "may exist" not in done.output


async def test_create_that_was_never_sent_is_not_repeated() -> None:
    balancer = Balancer([CUT])
    async with balancer.serving():
        pass
    done = await created("fleet", balancer.url)
    assert (done.exit_code, "refused" in done.output, "may exist" in done.output) == (
        1,
        True,
        False,
    )


async def test_client_tells_a_lost_answer_from_a_missing_daemon() -> None:
    balancer = Balancer([RESET])
    async with balancer.serving(), AsyncClient(url=balancer.url) as client:
        with pytest.raises(AnswerLost):
            await client.create_kernel("agent-1", {"command": ["true"]})
    async with AsyncClient(url=balancer.url) as client:
        with pytest.raises(Unreachable) as caught:
            await client.create_kernel("agent-1", {"command": ["true"]})
    assert not isinstance(caught.value, AnswerLost)
