"""Creates of both clients: repeated with one id and one attempt, and named in each error."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from agentd.client import AsyncClient, Client, creates, new_kernel_id
from agentd.errors import (
    AgentdError,
    AnswerLost,
    ImageUnavailable,
    InsufficientResource,
    KernelConflict,
    OutcomeUnknown,
    Refused,
    RefusedForNow,
    Unreachable,
)
from support.web_server import served

COMMAND: dict[str, Any] = {"command": ["true"]}
LOST = 0
"""An answer that is never sent."""
BALANCER = 503
"""An answer of a balancer without a node."""
PROBLEMS = {
    "OutcomeUnknown": 503,
    "ImageUnavailable": 503,
    "InsufficientResource": 409,
    "KernelConflict": 409,
    "Unauthorized": 401,
    "Internal": 500,
}


class Node:
    """A server of creates: each answer is lost, a code, or a kernel, and the last one stays."""

    def __init__(self, *answers: str | int) -> None:
        self.answers = [*answers]
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        step = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if step == LOST:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if step == BALANCER:
            return web.Response(status=503, text="<html>", headers={"Retry-After": "1"})
        if isinstance(step, int):
            return web.json_response({"kernel_id": self.bodies[-1]["kernel_id"]}, status=step)
        content = {"code": step, "detail": "so", "status": PROBLEMS[step]}
        return web.json_response(content, status=PROBLEMS[step], headers={"Retry-After": "1"})


class Clock:
    """A clock that sleeps set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr(creates, "time", clock)
    monkeypatch.setattr(AsyncClient, "_sleep", staticmethod(sleep))
    monkeypatch.setattr(Client, "_sleep", staticmethod(clock.sleep))
    return clock


async def create(kind: str, path: Path, request: dict[str, Any], **options: Any) -> Any:
    """Create a kernel, and return it or the error."""
    try:
        if kind == "asyncio":
            async with AsyncClient(path) as node:
                return await node.create_kernel("agent-1", request, **options)
        client = Client(path)
        return await asyncio.to_thread(client.create_kernel, "agent-1", request, **options)
    except AgentdError as error:
        return error


class Case(NamedTuple):
    """The answers to a create, the number of attempts, and the outcome."""

    answers: tuple[str | int, ...]
    attempts: int
    error: type[AgentdError] | None = None
    may_exist: bool = False


CASES = {
    "answered at once": Case((201,), 1),
    "its answer was lost twice": Case((LOST, LOST, 200), 3),
    "lost, and then the node starts": Case((LOST, "ImageUnavailable", 201), 3),
    "its outcome is unknown for a while": Case(("OutcomeUnknown", "OutcomeUnknown", 200), 3),
    "refused for the moment": Case(("ImageUnavailable", "ImageUnavailable", 201), 3),
    "a balancer without a node": Case((BALANCER, BALANCER, 201), 3),
    "refused": Case(("InsufficientResource",), 1, InsufficientResource),
    "lost, and then refused": Case((LOST, "InsufficientResource"), 2, InsufficientResource),
    "lost, and then another's": Case((LOST, "KernelConflict"), 2, KernelConflict),
    "lost, and then the token is gone": Case((LOST, "Unauthorized"), 2, Refused, may_exist=True),
    "a fault of the daemon": Case(("Internal",), 1, Refused, may_exist=True),
    "never answered": Case((LOST,), 31, AnswerLost, may_exist=True),
    "unknown for ever": Case(("OutcomeUnknown",), 31, OutcomeUnknown, may_exist=True),
    "a balancer without a node for ever": Case((BALANCER,), 31, RefusedForNow, may_exist=True),
    "refused for the moment for ever": Case(("ImageUnavailable",), 31, ImageUnavailable),
}


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
@pytest.mark.parametrize("case", CASES)
async def test_create_is_repeated_with_its_id(
    tmp_path: Path, clock: Clock, kind: str, case: str
) -> None:
    answers, attempts, error, may_exist = CASES[case]
    node = Node(*answers)
    async with served(tmp_path / "socket", node.answer):
        outcome = await create(kind, tmp_path / "socket", COMMAND)
    assert len(node.bodies) == attempts
    body = node.bodies[0]
    assert all(other == body for other in node.bodies)
    assert (body["command"], len(body["attempt"])) == (["true"], 16)
    if error is None:
        assert outcome == {"kernel_id": body["kernel_id"]}
    else:
        assert (type(outcome), outcome.kernel_id) == (error, body["kernel_id"])
        assert (f"kernel {body['kernel_id']} may exist" in str(outcome)) is may_exist


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_create_keeps_the_id_and_attempt_of_its_request(tmp_path: Path, kind: str) -> None:
    node = Node(201)
    mine = {"kernel_id": "k1", "attempt": "0123456789abcdef"}
    async with served(tmp_path / "socket", node.answer):
        await create(kind, tmp_path / "socket", {**COMMAND, **mine})
        await create(kind, tmp_path / "socket", {**COMMAND, "kernel_id": None, "attempt": None})
        await create(kind, tmp_path / "socket", COMMAND)
    assert node.bodies[0] == {**COMMAND, **mine}
    assert len({body["kernel_id"] for body in node.bodies}) == 3
    assert len({body["attempt"] for body in node.bodies}) == 3
    assert new_kernel_id() != new_kernel_id()


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_create_that_was_never_sent_is_not_repeated(tmp_path: Path, kind: str) -> None:
    outcome = await create(kind, tmp_path / "nobody", {**COMMAND, "kernel_id": "k1"})
    assert (type(outcome), outcome.kernel_id) == (Unreachable, "k1")
    assert "may exist" not in str(outcome)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_create_ends_within_its_own_timeout(tmp_path: Path, clock: Clock, kind: str) -> None:
    node = Node(LOST)
    async with served(tmp_path / "socket", node.answer):
        outcome = await create(kind, tmp_path / "socket", COMMAND, timeout_s=5)
    assert (type(outcome), len(node.bodies)) == (AnswerLost, 6)


async def test_long_attempts_that_are_cut_are_repeated_on(tmp_path: Path, clock: Clock) -> None:
    """A balancer cuts each of them, and a pull goes on meanwhile."""
    node = Node(*[LOST] * 50, 201)

    async def answer(request: web.Request) -> web.StreamResponse:
        clock.sleep(60)
        return await node.answer(request)

    async with served(tmp_path / "socket", answer):
        assert "kernel_id" in await create("asyncio", tmp_path / "socket", COMMAND)
    assert len(node.bodies) == 51


async def test_cancelled_create_names_its_kernel(tmp_path: Path) -> None:
    called, ended = asyncio.Event(), asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        called.set()
        await ended.wait()
        return web.Response()

    async with served(tmp_path / "socket", answer), AsyncClient(tmp_path / "socket") as node:
        request = {**COMMAND, "kernel_id": "k1"}
        creating = asyncio.create_task(node.create_kernel("agent-1", request))
        await called.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await creating
        ended.set()
    assert cancelled.value.__notes__ == ["kernel k1 may exist"]


def test_interrupted_create_names_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "open", interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        Client("nowhere").create_kernel("agent-1", {**COMMAND, "kernel_id": "k1"})
    assert interrupted.value.__notes__ == ["kernel k1 may exist"]
