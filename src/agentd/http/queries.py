"""Query parameters as pydantic models, and the preferences and the body of a request.

The OpenAPI document is generated from these models, so it matches the validation.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar, get_origin

from aiohttp import web
from multidict import MultiMapping
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from agentd.errors import InvalidRequest, Problem, RequestTimeout
from agentd.http.bodies import LABEL, problems_of

MAX_TIMEOUT_S = 86400.0
BODY_TIMEOUT_S = 30.0
MAX_PAGE = 1000
"""Entries of a page of a list: the maximum, and the default."""
MAX_PAGE_BYTES = 4 << 20
"""Bytes of JSON after which a page ends."""
_TOO_LARGE = web.RequestKey("too-large", web.HTTPRequestEntityTooLarge)

Flag = Annotated[bool, BeforeValidator(lambda text: text or "true")]
"""A boolean; a parameter without a value is true."""
Label = Annotated[str, Field(pattern=LABEL)]


class Query(BaseModel):
    """The query parameters of a route. Those that are lists may be repeated."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_QUERY = web.RequestKey("query", Query)


class LabelQuery(Query):
    """A query that selects labels."""

    label: list[Label] = Field(
        default_factory=list, description="Only entries with all of these labels: KEY=VALUE."
    )

    @property
    def labels(self) -> list[tuple[str, str]]:
        """The selected labels; one that is given twice has two values."""
        return [(name, value) for name, _, value in (text.partition("=") for text in self.label)]


_Q = TypeVar("_Q", bound=Query)


def read_query(model: type[_Q], query: MultiMapping[str]) -> _Q:
    """Parse query parameters.

    Raises:
        InvalidRequest: lists unknown and repeated parameters, or else the invalid ones.
    """
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    repeatable = {name for name, field in fields.items() if get_origin(field.annotation) is list}
    allowed = ", ".join(fields) or "none"
    problems = [
        Problem(name, f"unknown query parameter {name}; allowed: {allowed}")
        for name in sorted(set(query) - fields.keys())
    ]
    problems += [
        Problem(name, "given more than once")
        for name in fields
        if name not in repeatable and len(query.getall(name, [])) > 1
    ]
    if problems:
        raise InvalidRequest(problems)
    values = {n: query.getall(n) if n in repeatable else query[n] for n in fields if n in query}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(problems_of(model, error)) from None


def attach_query(request: web.Request, query: Query) -> None:
    """Attach the parsed query parameters to a request."""
    request[_QUERY] = query


def query_of(request: web.Request, model: type[_Q]) -> _Q:
    """Return the query parameters of a request, which its route parsed as `model`."""
    query = request[_QUERY]
    if not isinstance(query, model):
        raise TypeError(f"the route has {type(query).__name__}, not {model.__name__}")
    return query


class _WithoutNull(GenerateJsonSchema):
    """The schemas of parameters: None is an absent one, never a null."""

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def parameter_schemas(model: type[Query]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each query parameter by name."""
    schemas = model.model_json_schema(schema_generator=_WithoutNull).get("properties", {})
    return {
        name: {key: value for key, value in schema.items() if key != "title" and value is not None}
        for name, schema in schemas.items()
    }


def prefers_async(request: web.Request) -> bool:
    """Return whether a request prefers `respond-async` (RFC 7240)."""
    preferences = ",".join(request.headers.getall("Prefer", [])).split(",")
    return any(item.split(";")[0].strip().lower() == "respond-async" for item in preferences)


async def receive_body(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        InvalidRequest: the body cannot be read.
        RequestTimeout: the body does not arrive in time.
        HTTPRequestEntityTooLarge: the body is too large; repeated calls raise it again.
    """
    if (too_large := request.get(_TOO_LARGE)) is not None:
        raise too_large
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        request[_TOO_LARGE] = error
        raise
    except web.RequestPayloadError as error:
        raise InvalidRequest([Problem("", f"the body cannot be read: {error}")]) from None
