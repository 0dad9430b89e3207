"""Errors: what a refusal holds at most, and what of it others may read."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from agentd import errors
from agentd.client.errors import parse_content
from agentd.errors import (
    MAX_DETAIL,
    MAX_PROBLEMS,
    MAX_WHERE,
    MAX_WHY,
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    Problem,
    RuntimeFailure,
    UnsupportedResource,
)


def test_refusal_lists_the_first_problems_in_bounded_texts() -> None:
    built = 0

    def problems():
        nonlocal built
        for number in range(10**6):
            built += 1
            yield Problem(f"{number}" * 1000, "w" * 10**5)

    refusal = InvalidRequest(problems())
    assert built == MAX_PROBLEMS + 1
    assert len(refusal.problems) == MAX_PROBLEMS
    assert {len(problem.where) for problem in refusal.problems} == {MAX_WHERE}
    assert {len(problem.why) for problem in refusal.problems} == {MAX_WHY}
    assert len(str(refusal)) == len(refusal.public_text()) == MAX_DETAIL


def test_refusal_says_whether_there_is_more() -> None:
    one = Problem("image", "is unknown")
    assert str(InvalidRequest([one] * MAX_PROBLEMS)).endswith("image: is unknown")
    assert str(InvalidRequest([one] * (MAX_PROBLEMS + 1))).endswith("; and more")


def test_published_text_names_nothing_of_private_members() -> None:
    cases: list[tuple[AgentdError, str]] = [
        (InvalidRequest([Problem("env.SECRET", "is invalid")]), "env: is invalid"),
        (InvalidRequest([Problem("labels.SECRET", "is invalid")]), "labels: is invalid"),
        (InvalidRequest([Problem("command.0", "is invalid")]), "command: is invalid"),
        (InvalidRequest([Problem("SECRET", "is there twice", is_private=True)]), "is there twice"),
        (InvalidRequest([Problem("image", "is invalid")]), "image: is invalid"),
        (
            CommandNotFound("command 'SECRET': not found"),
            "the command does not exist or is not executable",
        ),
        (RuntimeFailure('engine: runc: exec: "SECRET": text file busy'), "engine: runc:"),
        (RuntimeFailure("engine: no space left on device"), "engine: no space left on device"),
    ]
    for error, expected in cases:
        assert error.public_text() == expected


def test_unknown_slots_are_all_listed_and_the_first_named() -> None:
    names = [f"{number:03}" + "x" * 250 for number in range(256)]
    refusal = UnsupportedResource(names, ["cpu"], {})
    assert refusal.facts()["slots"] == names
    assert len(str(refusal)) < (MAX_PROBLEMS + 2) * (MAX_WHERE + 2)
    assert ", and more (this node has: cpu)" in str(refusal)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
CLASSES = [kind for kind in KINDS if issubclass(kind, AgentdError)]
SAMPLES: dict[type[AgentdError], Any] = {
    errors.ConfigRefused: lambda kind: kind([Problem("a", "b")], "agent.toml"),
    errors._ListedRequestError: lambda kind: kind([Problem("env.A", "b")] * 99, is_local=True),
    UnsupportedResource: lambda kind: kind(
        {"tpu": 1}, ["cpu"], {"tpu": "failed"}, absent={"x": ""}
    ),
    errors.InsufficientResource: lambda kind: kind("cpu", "2", "1", [{"a": 1}], "limit", never=""),
    errors.Forbidden: lambda kind: kind("ann", "read", "kernels", ["admin"]),
    errors.CoresUnavailable: lambda kind: kind(["0", "1"], "busy"),
    errors.OutcomeUnknown: lambda kind: kind("lost", "k1"),
    errors.ImageUnavailable: lambda kind: kind("busy", 77),
    errors.Refused: lambda kind: kind("Tomorrow", "not yet", {"status": 503, "code": "Tomorrow"}),
    errors.OutputDropped: lambda kind: kind("k1", 3, 9),
    errors.NotReady: lambda kind: kind("no group", is_local=True),
}
"""Errors of the classes with members of their own; a class without a row is made as its base is."""


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],  # noqa: S301
)
def test_every_error_is_pickled_and_copied(kind: type[AgentdError], copied: Any) -> None:
    base = next((base for base in kind.__mro__ if base in SAMPLES), None)
    error: AgentdError = SAMPLES[base](kind) if base else kind("so")
    error.content, error.headers = {"detail": "so"}, {"Retry-After": "7"}
    error.kernel_id = "k1"
    error.add_note("a note")
    twin = copied(error)
    assert type(twin) is kind
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
    assert (twin.code, twin.facts(), twin.scope) == (error.code, error.facts(), error.scope)
    assert twin.public_text() == error.public_text()
    assert twin.__notes__ == ["a note"]


def test_errors_of_a_pool_of_processes_reach_the_caller() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        refused = pool.submit(parse_content, b"<html>").exception()
        assert isinstance(refused, errors.Refused)
        assert pool.submit(int, "7").result() == 7, "the pool goes on"
