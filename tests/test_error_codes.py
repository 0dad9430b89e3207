"""Rows of the table of error codes fit the families of classes, and clients follow them."""

import pytest

from agentd.client.errors import error_from_problem, error_from_response
from agentd.error_codes import ERROR_CODES, Scope
from agentd.errors import AgentdError, Refused, RefusedForNow, RequestError, Unavailable


def error_classes() -> dict[str, type[AgentdError]]:
    """Return the class of each code: the first one below the root."""
    classes: dict[str, type[AgentdError]] = {}
    pending: list[type[AgentdError]] = [AgentdError]
    while pending:
        kind = pending.pop(0)
        if "code" in vars(kind):
            classes.setdefault(kind.code, kind)
        pending += kind.__subclasses__()
    return classes


@pytest.mark.parametrize("code", ERROR_CODES)
def test_status_and_family_follow_from_the_scope(code: str) -> None:
    scope, status = ERROR_CODES[code]
    kind = error_classes().get(code, AgentdError)
    assert (status == 503) is (issubclass(kind, Unavailable) or scope is Scope.MOMENT)
    if scope is Scope.REQUEST:
        assert 400 <= status < 500
        assert kind is AgentdError or issubclass(kind, RequestError) or code == "ConfigRefused"
    if issubclass(kind, RequestError):
        assert scope in (Scope.REQUEST, Scope.NODE)
    if scope is Scope.NODE:
        assert status < 500 or status == 502


@pytest.mark.parametrize("code", ERROR_CODES)
def test_client_repeats_what_is_about_the_moment(code: str) -> None:
    status = ERROR_CODES[code].status
    content = {"code": code, "status": status, "detail": "x"}
    error = error_from_problem(content)
    assert error.scope is ERROR_CODES[code].scope
    assert isinstance(error, Unavailable) is (status == 503)


def test_code_of_a_newer_version_has_the_scope_of_its_status() -> None:
    cases = [
        (422, Scope.NODE, Refused),
        (503, Scope.MOMENT, RefusedForNow),
        (500, Scope.UNKNOWN, Refused),
    ]
    for status, scope, kind in cases:
        body = b'{"code": "Tomorrow", "status": %d, "detail": "x"}' % status
        error = error_from_response(status, body, "7")
        assert (type(error), error.scope, error.code) == (kind, scope, "Tomorrow")
        if isinstance(error, Unavailable):
            assert error.retry_after_s == 7
