"""Request bodies as pydantic models. Each member is declared here alone, with its description.

The OpenAPI document, the tables of `docs/reference/rpc.md` and the help of the options of
`agentctl create` are made from them. In help, a description has no backticks.
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
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from agentd.core.access import Caller
from agentd.core.claim.claim import MAX_TTL_S, MIN_TTL_S, ClaimHolder, ClaimSpec
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.options import (
    MAX_GROUP_ID,
    ULIMITS,
    Ulimit,
    parse_group,
)
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
    _NO_NUL,
    _PLATFORM,
    _TMPFS,
    ATTEMPT,
    ID,
    LINE,
    MAX_ID,
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
    refuse_too_long,
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


MAX_GROUPS = 64
"""Maximum groups of a request; each name is looked up on the host."""
Group = Annotated[
    int | str,
    BeforeValidator(
        parse_group,
        json_schema_input_type=Annotated[int, Field(ge=0, le=MAX_GROUP_ID)] | Name,
    ),
]
"""A group of the host, by name or number."""
_Limit = Annotated[int, Field(ge=-1, le=MAX_LIMIT)]
Amounts = Annotated[
    dict[Annotated[str, Field(max_length=MAX_NAME)], _Amount], Field(max_length=MAX_ITEMS)
]
"""Amounts by slot."""
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]
"""Whole seconds."""
Id = Annotated[str, Field(max_length=MAX_ID, pattern=ID)]
DeviceNames = Annotated[dict[Name, Names], Field(max_length=MAX_ITEMS)]
"""Ids, UUIDs or addresses of devices by device name."""
MAX_CONDITIONS, MAX_SENTENCE = 32, 1024
"""Maximum conditions of an engine, and characters of a text of one."""
_SLOTS = "Amounts of slots, such as cuda.device=1."
_DEVICES = "Only from these devices, by device name: ids, UUIDs or PCI addresses."


class MountRequest(Body):
    """A bind mount: a host folder or file below one of the allowed folders."""

    source: Path = Field(description="Folder or file of the host.")
    target: Path = Field(description="Path in the kernel.")
    read_only: bool = Field(True, description="Whether the kernel cannot write there.")


class PortRequest(Body):
    """A port of the kernel to publish; without `host` the engine chooses one."""

    container: int = Field(ge=1, le=65535, description="Port in the kernel.")
    host: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Port of the host. Default: one from `publish-ports`."
    )
    protocol: Literal["tcp", "udp"] = Field("tcp", description="Protocol of the port.")


class TmpfsRequest(Body):
    """A tmpfs mount, charged to the kernel's memory."""

    target: str = Field(max_length=MAX_PATH, pattern=_TMPFS, description="Path in the kernel.")
    size: Size | None = Field(None, description="Maximum size. Default: the engine's.")


class UlimitRequest(Body):
    """A limit of setrlimit(2); -1 means unlimited."""

    soft: _Limit = Field(description="The limit that applies.")
    hard: _Limit = Field(description="The maximum up to which the kernel can raise it.")


def _limits(raw: object) -> object:
    return {"soft": raw, "hard": raw} if isinstance(raw, int) else raw


_Limits = Annotated[
    UlimitRequest, BeforeValidator(_limits, json_schema_input_type=_Limit | UlimitRequest)
]


NOT_COMPARED = {"kernel_id", "attempt", "remove", "slots"}
"""Members that do not make two requests for kernels differ; slots are compared as amounts."""


class CreateKernelRequest(Body):
    """A kernel to create. Missing slots are zero; missing cpu and mem take their defaults."""

    is_required: ClassVar[bool] = True

    kernel_id: Id | None = Field(None, description="Id of the kernel. Default: a generated one.")
    image: Annotated[Text, Field(min_length=1, max_length=MAX_PATH)] | None = Field(
        None, description="Image; required by the runtime docker, ignored by the others."
    )
    command: Command = Field(
        [], description="Command with its arguments. Default: that of the image."
    )
    env: Variables = Field({}, description="Environment variables.")
    slots: Amounts = Field({}, description=_SLOTS)
    devices: DeviceNames = Field({}, description=_DEVICES)
    claim: Id | None = Field(None, description="Take the devices from this claim.")
    keep_claim: bool | None = Field(
        None,
        description="Whether the claim outlives the kernel; only with `claim`."
        " Default: whether the claim has an owner.",
    )
    overcommit: bool = Field(
        False,
        description="Whether devices of an observed claim may have other holders (set by admins).",
    )
    mounts: list[MountRequest] = Field(
        [],
        max_length=MAX_ITEMS,
        description="Folders of the host below `allowed-mounts`, read-only by default.",
    )
    ports: list[PortRequest] = Field([], max_length=MAX_ITEMS, description="Ports to publish.")
    labels: Labels = Field({}, description="Labels of the kernel.")
    working_dir: Path | None = Field(None, description="Working directory.")
    user: Name | None = Field(
        None, description="User in the container; elsewhere only the configured one."
    )
    pull_policy: Literal["missing", "always", "never"] = Field(
        "missing", description="When to pull the image."
    )
    platform: Annotated[str, Field(max_length=MAX_NAME, pattern=_PLATFORM)] | None = Field(
        None, description="Platform of the image. Default: the engine's."
    )
    network: Name | None = Field(
        None, description="Network: one of `allowed-networks`. Default: the node's."
    )
    tmpfs: list[TmpfsRequest] = Field(
        [],
        max_length=MAX_ITEMS,
        description="Folders in memory, which count as the kernel's memory.",
    )
    shm_size: Size | None = Field(
        None, description="Size of /dev/shm, which counts as the kernel's memory."
    )
    pids_limit: Annotated[int, Field(ge=1, le=2**22)] | None = Field(
        None, description="Maximum number of processes, up to the node's."
    )
    ulimits: dict[Name, _Limits] = Field(
        {}, max_length=len(ULIMITS), description="Limits of setrlimit(2); -1 is unlimited."
    )
    init: bool = Field(
        False, description="Whether process 1 is a small init, which reaps and forwards signals."
    )
    groups: list[Group] = Field(
        [],
        max_length=MAX_GROUPS,
        description="Further groups, by name or number: some of `allowed-groups`.",
    )
    entrypoint: Command | None = Field(
        None, description="Entrypoint; an empty one removes the image's. Default: the image's."
    )
    attempt: Annotated[str, Field(max_length=16, pattern=ATTEMPT)] | None = Field(
        None, description="Mark of this attempt, the same in each repetition: 16 hex digits."
    )
    remove: bool = Field(
        False, description="Whether the kernel is deleted once its creator has read its end."
    )

    @field_validator("ulimits")
    @classmethod
    def _known_limits(cls, value: dict[str, UlimitRequest]) -> dict[str, UlimitRequest]:
        for name, limit in value.items():
            if name not in ULIMITS:
                raise ValueError(f"invalid ulimit {name!r}: expected one of {', '.join(ULIMITS)}")
            if Ulimit(limit.soft, limit.hard).is_inverted:
                raise ValueError(f"the soft limit of {name} is above its hard limit")
        return value

    @field_validator("entrypoint")
    @classmethod
    def _fits_with_command(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        refuse_too_long([*(value or ()), *info.data.get("command", ())])
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
        unused = {"keep_claim"} if self.claim is None else set[str]()
        content = self.model_dump(exclude_defaults=True, exclude=NOT_COMPARED | unused)
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

    pid: Annotated[int, Field(ge=1, le=2**22)] | None = Field(
        None, description="Process with which the claim ends."
    )
    start_time: Annotated[int, Field(ge=0, le=MAX_LIMIT)] | None = Field(
        None, description="Start time of the process: field 22 of `/proc/PID/stat`."
    )
    cgroup: Path | None = Field(
        None, description="Cgroup (version 2) with whose last process the claim ends."
    )
    ttl: Ttl | None = Field(None, description="Seconds after which it ends, unless renewed.")
    name: Annotated[str, Field(max_length=MAX_NAME, pattern=LINE)] | None = Field(
        None, description="Name of a claim that only a `DELETE` or a reboot ends."
    )
    survives_reboot: bool = Field(
        False, description="Whether it outlives a reboot; only with `name`."
    )

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

    claim_id: Id | None = Field(None, description="Id of the claim. Default: a generated one.")
    slots: Amounts = Field({}, description=_SLOTS)
    devices: DeviceNames = Field({}, description=_DEVICES)
    holder: HolderRequest = Field(
        description="Holder of the claim: exactly one of `pid`, `cgroup`, `ttl` and `name`."
    )
    owner_uid: Annotated[int, Field(ge=0, le=2**32 - 2)] | None = Field(
        None, description="The only user besides admins who can use the claim (set by admins)."
    )
    labels: Labels = Field({}, description="Labels of the claim.")
    edits: Literal["process", "container"] = Field(
        "process", description="The target of the edits in the response."
    )
    observed: bool = Field(
        False, description="Whether others may hold the devices already (set by admins)."
    )

    def to_spec(self, agent_id: str, caller: Caller, holder: ClaimHolder) -> ClaimSpec:
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

    ttl: Ttl | None = Field(
        None, description="Seconds from now. Default: the time limit that the claim has."
    )


class EditsRequest(Body):
    """Claims whose edits are wanted together."""

    is_required: ClassVar[bool] = True

    claims: list[Name] = Field(min_length=1, max_length=MAX_ITEMS, description="Ids of claims.")
    edits_for: Literal["process", "container"] = Field(
        "process", alias="for", description="The target of the edits."
    )


_Sentence = Annotated[str, Field(max_length=MAX_SENTENCE, pattern=_NO_NUL)]


class EngineCondition(Body):
    """Something that operators should know about an engine, and what they can do."""

    reason: Annotated[_Sentence, Field(min_length=1, description="A sentence for operators.")]
    remedy: _Sentence = Field("", description="Advice for operators.")


class EngineRequest(Body):
    """Whether an engine has compared its devices with the claims of this node."""

    is_required: ClassVar[bool] = True

    ready: bool = Field(description="Whether the engine has compared its devices.")
    conditions: list[EngineCondition] | None = Field(
        None,
        max_length=MAX_CONDITIONS,
        description="Conditions that replace the engine's earlier ones. Default: they stay.",
    )


class StopRequest(Body):
    """The time between TERM and KILL, in seconds; default: the runtime's setting."""

    timeout: Annotated[float, Field(ge=0, le=86400, strict=False)] | None = Field(
        None, description="Seconds between TERM and KILL. Default: the runtime's setting."
    )


class SignalRequest(Body):
    """A signal for the first process of a kernel."""

    is_required: ClassVar[bool] = True

    signal: Literal["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "KILL"] = Field(
        description="Signal for the first process."
    )


class ExecRequest(Body):
    """The first frame of an exec."""

    is_required: ClassVar[bool] = True

    command: Annotated[Command, Field(min_length=1)] = Field(
        description="Command with its arguments."
    )
    tty: bool = Field(False, description="Whether it has a terminal.")
    env: Variables = Field({}, description="Variables added to the kernel's environment.")
    working_dir: Path | None = Field(None, description="Working directory. Default: the kernel's.")

    def to_spec(self) -> ExecSpec:
        """Return the command as the core knows it."""
        return msgspec.convert(self.model_dump(), ExecSpec)
