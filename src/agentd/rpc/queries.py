"""Query parameters of the node's routes as pydantic models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from agentd.core.kernel.states import KernelState
from agentd.core.times import parse_time_ns
from agentd.http.bodies import AFTER, ID
from agentd.http.queries import MAX_PAGE, MAX_TIMEOUT_S, Flag, LabelQuery, Query
from agentd.services.protocols import LogQuery, LogStream

_Id = Annotated[str, Field(pattern=ID)]
_State = Annotated[
    KernelState, WithJsonSchema({"type": "string", "enum": [state.value for state in KernelState]})
]
_Lines = Annotated[int, Field(ge=0, le=999_999_999)]
_Tail = Annotated[
    _Lines | None,
    BeforeValidator(
        lambda text: None if text == "all" else text,
        json_schema_input_type=_Lines | Literal["all"],
    ),
]
_Time = Annotated[
    int,
    BeforeValidator(
        lambda text: parse_time_ns(text.replace(" ", "+")),  # a plus sign in a query is a space
        json_schema_input_type=str,
    ),
]


class NodeQuery(Query):
    """The query of the node."""

    check: Flag = Field(False, description="Run the self-check, too.")


class CreateQuery(Query):
    """The query of a create."""

    dry_run: Flag = Field(False, description="Decide and explain; change nothing.")


class DeleteQuery(Query):
    """The query of a delete of a kernel."""

    timeout: float | None = Field(
        None, ge=0, le=MAX_TIMEOUT_S, description="Seconds between TERM and KILL."
    )


class EventsQuery(Query):
    """The query of the event stream."""

    last_event_id: str | None = Field(None, description="Resume after this event.")


class PageQuery(LabelQuery):
    """The query of a list with pages."""

    limit: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE, description="Maximum number of entries.")
    after: Annotated[str, Field(pattern=AFTER)] | None = Field(
        None, description="Only entries after this one: an id, or the cursor of Link."
    )


class KernelsQuery(PageQuery):
    """The query of a list of kernels on any node."""

    state: list[_State] = Field(
        default_factory=list, description="Only kernels in one of these states."
    )


class NodeKernelsQuery(KernelsQuery):
    """The query of a list of a node's kernels."""

    claim: _Id | None = Field(None, description="Only kernels that hold devices of this claim.")


class ClaimsQuery(PageQuery):
    """The query of a list of claims."""

    agent: _Id | None = Field(None, description="Only claims of this agent.")


class LogsQuery(Query):
    """The query of a kernel's log."""

    follow: Flag = Field(False, description="Follow until the kernel ends.")
    tail: _Tail = Field(None, description="Number of lines from the end.")
    since: _Time | None = Field(None, description="RFC 3339, or seconds since the epoch.")
    timestamps: Flag = Field(False, description="Prefix every line with its time.")
    stream: Literal["both", "stdout", "stderr"] | None = Field(
        None, description="Output to return."
    )
    from_position: int | None = Field(
        None,
        alias="from",
        ge=0,
        description="Bytes since the kernel began, of this stream and form; not with tail, since.",
    )

    @field_validator("from_position")
    @classmethod
    def _require_one_beginning(cls, position: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("tail") is not None or info.data.get("since") is not None:
            raise ValueError("cannot be combined with tail or since")
        return position

    def to_log_query(self) -> LogQuery:
        """Return the query as the services know it."""
        stream = None if self.stream in (None, "both") else LogStream(str(self.stream))
        return LogQuery(
            follow=self.follow,
            tail=self.tail,
            since_ns=self.since or 0,
            timestamps=self.timestamps,
            streams=frozenset(LogStream if stream is None else {stream}),
            from_position=self.from_position,
        )
