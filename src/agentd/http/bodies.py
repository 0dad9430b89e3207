"""Request bodies as pydantic models: shared members and the reading of a body.

The OpenAPI document is generated from these models, so it matches the validation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentd.core.kernel.states import KERNEL_ID
from agentd.core.labels import MAX_LABELS_BYTES, labels_size
from agentd.core.names import did_you_mean
from agentd.core.slots import WrittenFloat
from agentd.errors import PRIVATE_MEMBERS, InvalidRequest, Problem

MAX_ITEMS = 256
"""Maximum entries of a list of objects, or of an object keyed by slots or device names."""


MAX_WORDS = 4096
"""Maximum entries of a list of strings."""


MAX_PARTS = 8192
"""Maximum number of objects, members and fractions in one body."""


MAX_VARIABLES = 1024
"""Maximum entries of an object whose keys the client chooses: variables, labels."""


MAX_COMMAND_BYTES = 128 << 10
"""Maximum bytes of all words of a command, with those of its entrypoint."""


MAX_ID, MAX_NAME, MAX_PATH, MAX_TEXT = 63, 256, 4095, 32768
"""Maximum characters of an id, a name, a path (PATH_MAX of Linux without its NUL), and a text."""


_SHOWN = 80
"""Maximum characters that a problem quotes of an invalid value."""


_NO_NUL, _PATH, _NO_EQUALS, _TMPFS, _PLATFORM = (
    r"^[^\x00]*$",
    r"^/[^\x00]*$",
    r"^[^=\x00]+$",
    r"^/[^\x00,]*$",
    r"^[a-z0-9_]+/[a-z0-9_]+(/[a-z0-9_]+)?$",
)
ID = f"^{KERNEL_ID}$"
LINE = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+$"
"""The pattern of text without control characters, as in `core.printable`."""
ATTEMPT = "^[0-9a-fA-F]{16}$"
LABEL = r"^[^=]+=[\s\S]*$"
AFTER = rf"^([0-9]{{1,18}}~)?{KERNEL_ID}$"
"""The pattern of the parameter `after`: an id, or the cursor of `Link`."""


_WORDS = {
    _NO_NUL: "expected text without NUL",
    _PATH: "expected a path that begins with /",
    LINE: "expected one line of printable characters",
    _NO_EQUALS: "expected the name of a variable, without =",
    _TMPFS: "expected a path that begins with /, without commas",
    _PLATFORM: "expected OS/ARCHITECTURE, such as linux/amd64",
    ID: "expected a name: at most 63 of A-Z a-z 0-9 _ . -, with a letter or digit first",
    ATTEMPT: "expected 16 hex digits",
    LABEL: "expected KEY=VALUE",
    AFTER: "expected a listed id, or `after` of the header Link",
}
"""The expectation that each pattern stands for."""


_EXPECTED = {
    "string_type": "expected a string",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "dict_type": "expected an object",
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "missing": "is missing",
    "int_parsing": "expected a whole number",
    "float_parsing": "expected a number",
    "bool_parsing": "expected true or false",
}
"""The expectation by pydantic error type."""
_SHAPES = frozenset({*_EXPECTED, "extra_forbidden"})
"""Error types of a body's shape (members and JSON types), as opposed to values."""


Text = Annotated[str, Field(max_length=MAX_TEXT, pattern=_NO_NUL)]


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=_NO_NUL)]


Path = Annotated[str, Field(max_length=MAX_PATH, pattern=_PATH)]


Words = Annotated[list[Text], Field(max_length=MAX_WORDS, fail_fast=True)]


Names = Annotated[list[Name], Field(min_length=1, max_length=MAX_WORDS, fail_fast=True)]


def _within_bytes(labels: dict[str, str]) -> dict[str, str]:
    if (size := labels_size(labels)) > MAX_LABELS_BYTES:
        raise ValueError(f"{size} bytes in all labels exceed the limit of {MAX_LABELS_BYTES}")
    return labels


_Label = Annotated[str, Field(max_length=MAX_LABELS_BYTES, pattern=_NO_NUL)]


Labels = Annotated[
    dict[Name, _Label], Field(max_length=MAX_VARIABLES), AfterValidator(_within_bytes)
]


_Variable = Annotated[str, Field(max_length=MAX_NAME, pattern=_NO_EQUALS)]


Variables = Annotated[dict[_Variable, Text], Field(max_length=MAX_VARIABLES)]


def _executable(words: list[str]) -> list[str]:
    if words and not words[0]:
        raise ValueError("expected a non-empty first word in the command")
    if words and len(words[0].encode(errors="replace")) > MAX_PATH:
        raise ValueError(f"the first word is longer than {MAX_PATH} bytes, the limit for a path")
    refuse_too_long(words)
    return words


def refuse_too_long(words: Sequence[str]) -> None:
    """Refuse a command line of more than `MAX_COMMAND_BYTES`.

    Raises:
        ValueError: it is longer.
    """
    if (size := sum(len(word.encode(errors="replace")) for word in words)) > MAX_COMMAND_BYTES:
        raise ValueError(f"{size} bytes in all words exceed the limit of {MAX_COMMAND_BYTES}")


Command = Annotated[Words, AfterValidator(_executable)]


class Body(BaseModel):
    """A request body; unknown members are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)
    is_required: ClassVar[bool] = False
    """Whether a request must have a body."""


_B = TypeVar("_B", bound=Body)


def read_body(
    model: type[_B],
    raw: str | bytes,
    before_values: Callable[[Mapping[str, Any]], object] | None = None,
) -> _B:
    """Read a JSON body.

    `before_values` is called with the members of a body of the right shape, before their values are
    checked. It may raise an error that matters more.

    Raises:
        InvalidRequest: the body is not JSON or does not fit the model; lists the problems.
    """
    counted = _Counted()
    try:
        content = json.loads(
            raw or "{}", parse_float=counted.fraction, object_pairs_hook=counted.members
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest([Problem("", f"the body is not JSON: {error}")]) from None
    except (ValueError, RecursionError):
        why = "the body holds a number of over 4300 digits, or is nested too deeply"
        raise InvalidRequest([Problem("", why)]) from None
    if not isinstance(content, dict):
        raise InvalidRequest([Problem("", "the body is not a JSON object")])
    try:
        return model.model_validate(content)
    except ValidationError as error:
        if before_values is not None and _SHAPES.isdisjoint(
            item["type"] for item in error.errors()
        ):
            before_values(content)
        raise InvalidRequest(problems_of(model, error)) from None


class _Counted:
    """A counter of the parts that Python code parses: objects, members and fractions."""

    def __init__(self) -> None:
        self._count = 0

    def _add(self, number: int) -> None:
        self._count += number
        if self._count > MAX_PARTS:
            why = f"over {MAX_PARTS} objects, members of objects and fractions in all"
            raise InvalidRequest([Problem("", why)])

    def fraction(self, text: str) -> WrittenFloat:
        """Return a number with a fraction."""
        self._add(1)
        return WrittenFloat(text)

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object; refuse duplicate members, whose meaning RFC 8259 leaves open."""
        self._add(1 + len(pairs))
        members = dict(pairs)
        if len(members) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = ", ".join(sorted(name for name, count in counts.items() if count > 1))
            raise InvalidRequest([Problem(twice, "given more than once", is_private=True)])
        return members


def problems_of(model: type[BaseModel], error: ValidationError) -> Iterator[Problem]:
    """Yield what is invalid in a body or query, in words of our own."""
    for item in error.errors(include_url=False):
        kind, place, given = item["type"], item["loc"], item["input"]
        why = _EXPECTED.get(kind, item["msg"])
        if kind == "string_pattern_mismatch":
            why = _WORDS[item["ctx"]["pattern"]]
        if kind == "extra_forbidden":
            known = list(model.model_fields)
            hint = did_you_mean(str(place[-1])[:_SHOWN], known, 0.6)
            allowed = f"allowed: {', '.join(known)}" if len(place) == 1 else ""
            why = f"unknown member; {hint}{allowed}".rstrip("; ")
        elif kind == "value_error":
            why = why.removeprefix("Value error, ")
        elif kind != "missing" and place[0] not in PRIVATE_MEMBERS:
            why += "" if isinstance(given, (dict, list)) else f", not {given!r:.{_SHOWN}}"
        yield Problem(".".join(str(part) for part in place if part != "[key]"), why)
