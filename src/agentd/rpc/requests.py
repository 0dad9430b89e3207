"""Requests as pydantic models: what comes over the wire, checked.

The OpenAPI document is made from these, so what it says is what is checked.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from agentd.core.access import Caller
from agentd.core.kernel.edits import Mount
from agentd.core.kernel.options import (
    ULIMITS,
    ContainerOptions,
    PullPolicy,
    Tmpfs,
    Ulimit,
)
from agentd.core.kernel.states import KERNEL_ID, KernelSpec, Port
from agentd.core.slots import (
    MAX_TEXT,
    AmountError,
    SlotKind,
    WrittenFloat,
    parse_base_units,
    parse_quantity,
)
from agentd.errors import PRIVATE_MEMBERS, InvalidRequest, Problem

MAX_LIMIT = 2**63 - 1
MAX_ITEMS = 256
"""Entries of a list of objects, and of an object with names of the node: slots, device names."""
MAX_WORDS = 4096
"""Entries of a list of texts."""
MAX_PARTS = 8192
"""Objects, members of objects and fractions of one body together."""
MAX_VARIABLES = 1024
"""Entries of an object with names of the caller's: variables, labels."""
MAX_NAME, MAX_PATH = 256, 4095
"""Characters of a name, and of a path: PATH_MAX of Linux without its NUL."""
MAX_LABELS = 64 * 1024
"""Characters of all labels: an engine repeats them in every event."""
_SHOWN = 80
"""Characters of an invalid value that a problem quotes."""

_NO_NUL, _PATH, _NO_EQUALS, _TMPFS, _PLATFORM, _ID = (
    r"^[^\x00]*$",
    r"^/[^\x00]*$",
    r"^[^=\x00]+$",
    r"^/[^\x00,]*$",
    r"^[a-z0-9_]+/[a-z0-9_]+(/[a-z0-9_]+)?$",
    f"^{KERNEL_ID}$",
)
_WORDS = {
    _NO_NUL: "expected text without NUL",
    _PATH: "expected a path that begins with /",
    _NO_EQUALS: "expected the name of a variable, without =",
    _TMPFS: "expected a path that begins with /, without commas",
    _PLATFORM: "expected OS/ARCHITECTURE, such as linux/amd64",
    _ID: "expected a name: at most 63 of A-Z a-z 0-9 _ . -, with a letter or digit first",
}
"""What each pattern takes, in words."""
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
}
"""What a member takes, by pydantic's type of the error."""

Text = Annotated[str, Field(max_length=32768, pattern=_NO_NUL)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=_NO_NUL)]
Path = Annotated[str, Field(max_length=MAX_PATH, pattern=_PATH)]
Words = Annotated[list[Text], Field(max_length=MAX_WORDS, fail_fast=True)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MAX_WORDS, fail_fast=True)]
Labels = Annotated[dict[Name, Text], Field(max_length=MAX_VARIABLES)]
_Variable = Annotated[str, Field(max_length=MAX_NAME, pattern=_NO_EQUALS)]
Variables = Annotated[dict[_Variable, Text], Field(max_length=MAX_VARIABLES)]
_Amount = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_TEXT}]},
    ),
]
"""Any JSON: what cannot be read of it is an `InvalidSlotAmount`."""


def _executable(words: list[str]) -> list[str]:
    if words and not words[0]:
        raise ValueError("expected a non-empty first word in the command")
    if words and len(words[0].encode(errors="replace")) > MAX_PATH:
        raise ValueError(f"the first word is longer than {MAX_PATH} bytes, the limit for a path")
    return words


Command = Annotated[Words, AfterValidator(_executable)]


def _size(raw: object) -> int:
    try:
        size = parse_base_units(raw, SlotKind.BYTES)
    except AmountError as error:
        raise ValueError(str(error)) from None
    if not 0 < size <= MAX_LIMIT:
        raise ValueError('expected more than 0 bytes, such as "64m"')
    return size


_WrittenSize = (
    Annotated[int, Field(ge=1, le=MAX_LIMIT)] | Annotated[str, Field(max_length=MAX_TEXT)]
)
Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=_WrittenSize)]
"""Bytes, as a number or as text such as "64m"."""


_Limit = Annotated[int, Field(ge=-1, le=MAX_LIMIT)]


class Body(BaseModel):
    """A request body; members it does not list are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class MountRequest(Body):
    """A host folder or file inside the kernel, below one of the node's allowed folders."""

    source: Path
    target: Path
    read_only: bool = True


class PortRequest(Body):
    """A port of the kernel to publish; without `host` the engine chooses one."""

    container: Annotated[int, Field(ge=1, le=65535)]
    host: Annotated[int, Field(ge=1, le=65535)] | None = None
    protocol: Literal["tcp", "udp"] = "tcp"


class TmpfsRequest(Body):
    """A folder in memory, which counts as the kernel's memory."""

    target: Annotated[str, Field(max_length=MAX_PATH, pattern=_TMPFS)]
    size: Size | None = None


class UlimitRequest(Body):
    """A limit of setrlimit(2); -1 means unlimited."""

    soft: _Limit
    hard: _Limit


def _limits(raw: object) -> object:
    return {"soft": raw, "hard": raw} if isinstance(raw, int) else raw


_Limits = Annotated[
    UlimitRequest, BeforeValidator(_limits, json_schema_input_type=_Limit | UlimitRequest)
]


class CreateKernelRequest(Body):
    """A kernel to create. Slots that are absent are zero; absent cpu and mem take defaults."""

    kernel_id: Annotated[str, Field(max_length=63, pattern=_ID)] | None = None
    image: Annotated[Text, Field(min_length=1, max_length=MAX_PATH)] | None = None
    command: Command = []
    env: Variables = {}
    slots: Annotated[
        dict[Annotated[str, Field(max_length=MAX_NAME)], _Amount], Field(max_length=MAX_ITEMS)
    ] = {}
    devices: Annotated[dict[Name, Names], Field(max_length=MAX_ITEMS)] = {}
    mounts: Annotated[list[MountRequest], Field(max_length=MAX_ITEMS)] = []
    ports: Annotated[list[PortRequest], Field(max_length=MAX_ITEMS)] = []
    labels: Labels = {}
    working_dir: Path | None = None
    user: Name | None = None
    pull_policy: Literal["missing", "always", "never"] = "missing"
    platform: (
        Annotated[
            str,
            Field(max_length=MAX_NAME, pattern=_PLATFORM),
        ]
        | None
    ) = None
    network: Name | None = None
    tmpfs: Annotated[list[TmpfsRequest], Field(max_length=MAX_ITEMS)] = []
    shm_size: Size | None = None
    pids_limit: Annotated[int, Field(ge=1, le=2**22)] | None = None
    ulimits: Annotated[dict[Name, _Limits], Field(max_length=len(ULIMITS))] = {}

    @field_validator("ulimits")
    @classmethod
    def _known_limits(cls, value: dict[str, UlimitRequest]) -> dict[str, UlimitRequest]:
        for name, limit in value.items():
            if name not in ULIMITS:
                raise ValueError(f"invalid ulimit {name!r}: expected one of {', '.join(ULIMITS)}")
            if limit.hard != -1 and not -1 < limit.soft <= limit.hard:
                raise ValueError(f"the soft limit of {name} is above its hard limit")
        return value

    @field_validator("labels")
    @classmethod
    def _not_too_long(cls, value: dict[str, str]) -> dict[str, str]:
        if (size := sum(len(name) + len(text) for name, text in value.items())) > MAX_LABELS:
            raise ValueError(f"{size} characters are too many; allowed: {MAX_LABELS} in all")
        return value

    def to_spec(self, agent_id: str, caller: Caller | None = None) -> KernelSpec:
        """Return the request as the core knows it, with a kernel id if it has none."""
        return KernelSpec(
            kernel_id=self.kernel_id or f"k-{uuid.uuid4().hex[:12]}",
            agent_id=agent_id,
            command=tuple(self.command),
            spec_hash=self.digest(agent_id),
            image=self.image,
            env=self.env,
            slots=self.slots,
            devices={name: tuple(ids) for name, ids in self.devices.items()},
            mounts=tuple(Mount(m.source, m.target, m.read_only) for m in self.mounts),
            ports=tuple(Port(p.container, p.host, p.protocol) for p in self.ports),
            labels=self.labels,
            working_dir=self.working_dir,
            user=self.user,
            container=ContainerOptions(
                pull_policy=PullPolicy(self.pull_policy),
                platform=self.platform,
                network=self.network,
                tmpfs=tuple(Tmpfs(t.target, t.size) for t in self.tmpfs),
                shm_size=self.shm_size,
                pids_limit=self.pids_limit,
                ulimits={name: Ulimit(u.soft, u.hard) for name, u in self.ulimits.items()},
            ),
            created_by=caller.name if caller else "",
            is_discreet=caller is not None and caller.agents is not None,
        )

    def digest(self, agent_id: str) -> str:
        """Return a hash that is equal for equal requests; what says nothing does not count."""
        content = self.model_dump(exclude_defaults=True, exclude={"kernel_id", "slots"})
        content |= {"agent_id": agent_id, "slots": _canonical(self.slots)}
        return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


def _canonical(slots: Mapping[str, object]) -> dict[str, str]:
    """Return one canonical form for equal requests; zero slots are left out, but cpu and mem."""
    result = {}
    for name, raw in slots.items():
        try:
            quantity = parse_quantity(raw)
        except AmountError:
            result[name] = "?"  # no kernel has it: the request is going to be refused
            continue
        if quantity.value or name in ("cpu", "mem"):
            result[name] = quantity.canonical()
    return result


class StopRequest(Body):
    """How long a kernel has between TERM and KILL; default: the runtime's setting."""

    timeout: Annotated[float, Field(ge=0, le=86400, strict=False)] | None = None


_B = TypeVar("_B", bound=Body)


def read_body(model: type[_B], raw: str | bytes) -> _B:
    """Read a JSON body.

    Raises:
        InvalidRequest: it is not JSON or does not fit the model; of many problems the first.
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
        raise InvalidRequest(_problems(model, error)) from None


class _Counted:
    """Counts the parts of a body that are read by Python code: objects, members and fractions."""

    def __init__(self) -> None:
        self._count = 0

    def _add(self, number: int) -> None:
        self._count += number
        if self._count > MAX_PARTS:
            why = f"over {MAX_PARTS} objects, members of objects and fractions in all"
            raise InvalidRequest([Problem("", why)])

    def fraction(self, text: str) -> WrittenFloat:
        """Return a number that is not whole."""
        self._add(1)
        return WrittenFloat(text)

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object; RFC 8259 does not say which of two members of one name counts."""
        self._add(1 + len(pairs))
        members = dict(pairs)
        if len(members) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = ", ".join(sorted(name for name, count in counts.items() if count > 1))
            raise InvalidRequest([Problem(twice, "given more than once", is_private=True)])
        return members


def _problems(model: type[Body], error: ValidationError) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        message = _EXPECTED.get(item["type"], item["msg"])
        if item["type"] == "string_pattern_mismatch":
            message = _WORDS[item["ctx"]["pattern"]]
        yield _problem(model, item["loc"], item["type"], message, item["input"])


def _problem(
    model: type[Body], place: tuple[int | str, ...], kind: str, message: str, given: object
) -> Problem:
    where = ".".join(str(part) for part in place if part != "[key]")
    if kind == "extra_forbidden":
        known = list(model.model_fields)
        near = get_close_matches(str(place[-1])[:_SHOWN], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        allowed = f"allowed: {', '.join(known)}" if len(place) == 1 else ""
        return Problem(where, f"unknown member; {hint}{allowed}".rstrip("; "))
    if kind == "value_error":
        return Problem(where, message.removeprefix("Value error, "))
    if kind == "missing":
        return Problem(where, message)
    is_quoted = place[0] not in PRIVATE_MEMBERS and not isinstance(given, (dict, list))
    return Problem(where, f"{message}, not {given!r:.{_SHOWN}}" if is_quoted else message)
