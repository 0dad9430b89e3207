"""Request bodies as pydantic models.

The OpenAPI document is generated from them, so it matches the validation.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import (
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from agentd.core.access import Caller
from agentd.core.claim.claim import MAX_TTL_S, MIN_TTL_S, ClaimOwner, ClaimSpec
from agentd.core.kernel.options import ULIMITS
from agentd.core.kernel.states import KernelSpec
from agentd.core.slots import (
    CPU,
    MAX_TEXT,
    MEM,
    AmountError,
    Quantity,
    SlotKind,
    parse_base_units,
    read_quantity,
)
from agentd.http.bodies import (
    _PLATFORM,
    _TMPFS,
    ID,
    MAX_ITEMS,
    MAX_NAME,
    MAX_PATH,
    Body,
    Command,
    Labels,
    Name,
    Names,
    Path,
    Text,
    Variables,
)

MAX_LIMIT = 2**63 - 1


_Amount = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_TEXT}]},
    ),
]
"""Any JSON; an unreadable value becomes `InvalidSlotAmount`."""


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
Amounts = Annotated[
    dict[Annotated[str, Field(max_length=MAX_NAME)], _Amount], Field(max_length=MAX_ITEMS)
]
"""Amounts by slot."""
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]
"""Whole seconds."""


class MountRequest(Body):
    """A bind mount: a host folder or file below one of the allowed folders."""

    source: Path
    target: Path
    read_only: bool = True


class PortRequest(Body):
    """A port of the kernel to publish; without `host` the engine chooses one."""

    container: Annotated[int, Field(ge=1, le=65535)]
    host: Annotated[int, Field(ge=1, le=65535)] | None = None
    protocol: Literal["tcp", "udp"] = "tcp"


class TmpfsRequest(Body):
    """A tmpfs mount, charged to the kernel's memory."""

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
    """A kernel to create. Missing slots are zero; missing cpu and mem take their defaults."""

    is_required: ClassVar[bool] = True

    kernel_id: Annotated[str, Field(max_length=63, pattern=ID)] | None = None
    image: Annotated[Text, Field(min_length=1, max_length=MAX_PATH)] | None = None
    command: Command = Field([])
    env: Variables = Field({})
    slots: Amounts = Field({})
    devices: Annotated[dict[Name, Names], Field(max_length=MAX_ITEMS)] = Field({})
    claim: Annotated[str, Field(max_length=63, pattern=ID)] | None = None
    keep_claim: bool = False
    mounts: Annotated[list[MountRequest], Field(max_length=MAX_ITEMS)] = Field([])
    ports: Annotated[list[PortRequest], Field(max_length=MAX_ITEMS)] = Field([])
    labels: Labels = Field({})
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
    tmpfs: Annotated[list[TmpfsRequest], Field(max_length=MAX_ITEMS)] = Field([])
    shm_size: Size | None = None
    pids_limit: Annotated[int, Field(ge=1, le=2**22)] | None = None
    ulimits: Annotated[dict[Name, _Limits], Field(max_length=len(ULIMITS))] = Field({})

    @field_validator("ulimits")
    @classmethod
    def _known_limits(cls, value: dict[str, UlimitRequest]) -> dict[str, UlimitRequest]:
        for name, limit in value.items():
            if name not in ULIMITS:
                raise ValueError(f"invalid ulimit {name!r}: expected one of {', '.join(ULIMITS)}")
            if limit.hard != -1 and not -1 < limit.soft <= limit.hard:
                raise ValueError(f"the soft limit of {name} is above its hard limit")
        return value

    @model_validator(mode="after")
    def _keeps_a_claim(self) -> Self:
        if self.keep_claim and self.claim is None:
            raise ValueError("keep_claim goes with claim")
        return self

    def to_spec(self, agent_id: str, caller: Caller | None = None) -> KernelSpec:
        """Return the core's kernel spec, with a generated kernel id if the request has none.

        Members that the spec does not have are its options, for the runtime.
        """
        members = self.model_dump(exclude_defaults=True)
        fields = KernelSpec.__struct_encode_fields__
        spec = {
            "kernel_id": f"k-{uuid.uuid4().hex[:12]}",
            "command": (),
            **{name: value for name, value in members.items() if name in fields},
            "agent_id": agent_id,
            "spec_hash": self.digest(agent_id),
            "slots": _read(self.slots),
            "options": {name: value for name, value in members.items() if name not in fields},
            "created_by": caller.name if caller else "",
            "is_discreet": caller is not None and caller.agents is not None,
            "caller": caller,
        }
        return msgspec.convert(spec, KernelSpec)

    def digest(self, agent_id: str = "") -> str:
        """Return a hash that is equal for equal requests; defaults and zero slots do not count.

        A request to a fleet has no agent. cpu and mem always count, because their defaults are not
        zero. Unreadable amounts share one form: no kernel can have them, since it is refused.
        """
        content = self.model_dump(exclude_defaults=True, exclude={"kernel_id", "slots"})
        return _hash_of(content, agent_id, _read(self.slots))


def _hash_of(
    content: dict[str, Any], agent_id: str, slots: Mapping[str, Quantity | AmountError]
) -> str:
    canonical = {
        name: read.canonical() if isinstance(read, Quantity) else "?"
        for name, read in slots.items()
        if isinstance(read, AmountError) or read.value or name in (CPU, MEM)
    }
    content |= {"agent_id": agent_id, "slots": canonical}
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


def _read(slots: Mapping[str, object]) -> dict[str, Quantity | AmountError]:
    return {name: read_quantity(raw) for name, raw in slots.items()}


class HolderRequest(Body):
    """The holder of a claim: a process, a cgroup, a time limit in seconds, or a name."""

    pid: Annotated[int, Field(ge=1, le=2**22)] | None = None
    start_time: Annotated[int, Field(ge=0, le=MAX_LIMIT)] | None = None
    cgroup: Path | None = None
    ttl: Ttl | None = None
    name: Name | None = None
    survives_reboot: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        kinds = ("pid", "cgroup", "ttl", "name")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"got {got}, expected exactly one of {', '.join(kinds)}")
        if self.start_time is not None and self.pid is None:
            raise ValueError("start_time goes with pid")
        if self.survives_reboot and self.name is None:
            raise ValueError("survives_reboot goes with name")
        return self


class CreateClaimRequest(Body):
    """Devices to claim. Slots that are absent are zero, cpu and mem too."""

    is_required: ClassVar[bool] = True

    claim_id: Annotated[str, Field(max_length=63, pattern=ID)] | None = None
    slots: Amounts = Field({})
    devices: Annotated[dict[Name, Names], Field(max_length=MAX_ITEMS)] = Field({})
    holder: HolderRequest
    owner_uid: Annotated[int, Field(ge=0, le=2**32 - 2)] | None = None
    labels: Labels = Field({})
    edits: Literal["process", "container"] = "process"
    observed: bool = False

    def to_spec(self, agent_id: str, caller: Caller, holder: ClaimOwner) -> ClaimSpec:
        """Return the request as the core knows it, with a verified holder, and a claim id."""
        slots = _read(self.slots)
        members = self.model_dump(exclude_defaults=True, exclude={"claim_id", "slots", "holder"})
        content = {**members, "holder": msgspec.to_builtins(holder)}
        spec = {
            **members,
            "claim_id": self.claim_id or f"c-{uuid.uuid4().hex[:12]}",
            "agent_id": agent_id,
            "holder": holder,
            "request_hash": _hash_of(content, agent_id, slots),
            "slots": slots,
            "created_by": caller.name,
            "is_discreet": caller.agents is not None,
        }
        return msgspec.convert(spec, ClaimSpec)


class RenewRequest(Body):
    """The time limit of a claim from now on, in seconds; default: the one that it has."""

    ttl: Ttl | None = None


class EditsRequest(Body):
    """Claims whose edits are wanted together."""

    is_required: ClassVar[bool] = True

    claims: Annotated[list[Name], Field(min_length=1, max_length=MAX_ITEMS)]
    edits_for: Annotated[Literal["process", "container"], Field(alias="for")] = "process"


class EngineRequest(Body):
    """Whether an engine has compared its devices with the claims of this node."""

    is_required: ClassVar[bool] = True

    ready: bool


class StopRequest(Body):
    """The time between TERM and KILL, in seconds; default: the runtime's setting."""

    timeout: Annotated[float, Field(ge=0, le=86400, strict=False)] | None = None
