"""Query parameters by their models, and parts of a request that must arrive in time."""

import asyncio
from unittest.mock import Mock

import pytest
from multidict import MultiDict
from pydantic import Field

from agentd.errors import InvalidRequest, RequestTimeout
from agentd.http import queries
from agentd.http.queries import Flag, LabelQuery, parameter_schemas, read_query


class Sample(LabelQuery):
    """A query with a parameter of each kind."""

    flag: Flag = Field(False, description="A flag.")
    number: int = Field(7, ge=1, le=9)
    seconds: float | None = Field(None, ge=0, le=60)


def test_query_is_read_by_its_model() -> None:
    query = read_query(Sample, MultiDict([("label", "a=1"), ("number", "3"), ("label", "a=b=c")]))
    assert (query.number, query.flag, query.seconds) == (3, False, None)
    assert query.labels == [("a", "1"), ("a", "b=c")]


@pytest.mark.parametrize(
    ("text", "value"), [("", True), ("True", True), ("1", True), ("false", False), ("0", False)]
)
def test_flag_is_true_without_a_value(text: str, value: bool) -> None:
    assert read_query(Sample, MultiDict(flag=text)).flag is value


@pytest.mark.parametrize(
    ("query", "problems"),
    [
        ([("x", "1"), ("number", "1"), ("number", "2")],
         ["x: unknown query parameter x; allowed: label, flag, number, seconds",
          "number: given more than once"]),
        ([("number", "many")], ["number: expected a whole number, not 'many'"]),
        ([("flag", "maybe")], ["flag: expected true or false, not 'maybe'"]),
        ([("label", "=x"), ("seconds", "soon")],
         ["label.0: expected KEY=VALUE, not '=x'", "seconds: expected a number, not 'soon'"]),
    ],
)  # fmt: skip
def test_invalid_query_is_refused(query: list[tuple[str, str]], problems: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_query(Sample, MultiDict(query))
    assert [str(problem) for problem in refused.value.problems] == problems


@pytest.mark.parametrize("text", ["-1", "61", "nan", "inf"])
def test_number_outside_of_its_bounds_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_query(Sample, MultiDict(seconds=text))


def test_document_has_the_parameters_of_a_model() -> None:
    assert parameter_schemas(Sample) == {
        "label": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[^=]+=[\\s\\S]*$"},
            "description": "Only entries with all of these labels: KEY=VALUE.",
        },
        "flag": {"type": "boolean", "default": False, "description": "A flag."},
        "number": {"type": "integer", "default": 7, "minimum": 1, "maximum": 9},
        "seconds": {"type": "number", "minimum": 0, "maximum": 60},
    }


class Slow(dict):
    """A request whose body does not come."""

    content = Mock(**{"is_eof.return_value": False})

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert queries.BODY_TIMEOUT_S == 30
    monkeypatch.setattr(queries, "BODY_TIMEOUT_S", 0.05)
    with pytest.raises(RequestTimeout, match="the body did not come"):
        await queries.receive_body(Slow())  # type: ignore[arg-type]
