"""`agentctl create` and `run` repeat a create on a clock of their own, and end."""

from typing import Any

import pytest

from agentd.cli.agentctl import run
from agentd.client import Client, creates
from agentd.client.calls import Call
from agentd.errors import (
    AgentdError,
    AnswerLost,
    ImageUnavailable,
    KernelConflict,
    NodeUnavailable,
    OutcomeUnknown,
    Unavailable,
)

ATTEMPT_S = 10.0
MANY = 100


class Clock:
    """The time of a program, which passes only while it sleeps or waits for an answer."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowNode:
    """A client of a node that takes long for each answer: one that is lost, then others."""

    def __init__(self, clock: Clock, kind: type[Unavailable]) -> None:
        self.clock, self.kind = clock, kind
        self.attempts = 0

    def execute(self, *_: object, **__: object) -> dict[str, Any]:
        self.attempts += 1
        self.clock.sleep(ATTEMPT_S)
        if self.attempts == MANY:
            raise KernelConflict("enough")
        raise self.kind("so") if self.attempts > 1 else AnswerLost("cut")


def by_client(node: Any) -> object:
    client = Client(timeout_s=15)
    client.execute = node.execute  # type: ignore[method-assign]
    client._sleep = node.clock.sleep  # type: ignore[method-assign]
    try:
        return client.create_kernel("agent-1", {"kernel_id": "k1"})
    except AgentdError as error:
        return error


def by_fleet(node: Any) -> object:
    client = Client(timeout_s=15)
    client.execute = node.execute  # type: ignore[method-assign]
    client._sleep = node.clock.sleep  # type: ignore[method-assign]
    try:
        return client.execute_create(Call("POST", "/v1/kernels", {"kernel_id": "k1"}))
    except AgentdError as error:
        return error


def by_run(client: Any) -> object:
    running = run.Run(client, "agent-1", {"kernel_id": "k1", "labels": {}})
    running._pause = client.clock.sleep  # type: ignore[method-assign]
    running._run_to_end()
    return running._events.get()


@pytest.mark.parametrize("command", [by_client, by_fleet, by_run])
@pytest.mark.parametrize("kind", [AnswerLost, OutcomeUnknown, ImageUnavailable, NodeUnavailable])
def test_only_a_cut_after_a_while_is_repeated_on_and_on(
    monkeypatch: pytest.MonkeyPatch, kind: type[Unavailable], command: Any
) -> None:
    clock = Clock()
    for module in (creates, run):
        monkeypatch.setattr(module, "time", clock)
    node = SlowNode(clock, kind)
    outcome = command(node)
    if kind is AnswerLost:  # a balancer cuts each of them, and a pull goes on meanwhile
        assert (type(outcome), node.attempts) == (KernelConflict, MANY)
    else:
        assert (type(outcome), node.attempts) == (kind, 3)
