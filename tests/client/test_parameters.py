"""Every parameter of every method of the client changes the call that is made."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from agentd.client import AsyncClient, Client
from agentd.client.calls import Call
from agentd.errors import UnknownKernel

GENERATED = ("kernel_id", "claim_id", "attempt")
METHODS = {
    name: method
    for name, method in vars(Client).items()
    if not name.startswith("_") and name != "execute_create"  # its caller makes the call
}
CALLBACKS = ("on_outage", "on_dropped")
"""They change no call; tests/client/test_following.py is about them."""
SAMPLES: dict[str, tuple[Any, Any]] = {
    "str": ("one", "other"), "str | None": ("one", "other"),
    "str | Sequence[str] | None": ("one", ["one", "other"]), "Sequence[str]": (["one"], ["other"]),
    "str | float | None": ("1", 2.5), "bool": (False, True), "int | None": (1, 2),
    "float": (1.0, 2.0), "float | None": (1.0, 2.0),
    "Sequence[Mapping[str, str]] | None": ([], [{"reason": "r"}]),
    "Mapping[str, str] | None": ({"a": "b"}, {"a": "c"}),
    "Mapping[str, Any]": ({"command": ["a"]}, {"command": ["b"]}),
}  # fmt: skip
"""Two values of each type of a parameter."""
REQUIRED = inspect.Parameter.empty


def call_of(method: Callable[..., Any], arguments: dict[str, Any]) -> tuple[object, ...]:
    """Return what a method sends, with generated ids made equal."""
    sent: list[tuple[object, ...]] = []

    def open_call(client: Client, call: Call[Any], timeout_s: float | None = None) -> object:
        body = {k: v for k, v in (call.body or {}).items() if k not in GENERATED}
        whole_s = None if timeout_s is None else round(timeout_s)
        sent.append((call.method, call.path, body, dict(call.headers), whole_s))
        raise UnknownKernel("k")

    with patch.object(Client, "open", open_call), contextlib.suppress(UnknownKernel):
        answer = method(Client("/a.sock"), **arguments)
        next(answer)  # of a stream
    return sent[0]


@pytest.mark.parametrize("name", METHODS)
def test_each_parameter_changes_the_call(name: str) -> None:
    parameters = list(inspect.signature(METHODS[name]).parameters.values())[1:]
    required = {p.name: SAMPLES[p.annotation][0] for p in parameters if p.default is REQUIRED}
    calls = {"nothing": call_of(METHODS[name], required)}
    for parameter in parameters:
        if parameter.name not in CALLBACKS:
            values = (v for v in SAMPLES[parameter.annotation] if v != parameter.default)
            value = [*values][-1]
            calls[parameter.name] = call_of(METHODS[name], {**required, parameter.name: value})
    assert len(set(map(repr, calls.values()))) == len(calls), calls


def test_both_clients_have_the_same_parameters() -> None:
    for name, method in METHODS.items():
        parameters = inspect.signature(getattr(AsyncClient, name)).parameters
        assert list(parameters) == list(inspect.signature(method).parameters), name
