"""The table of error codes: the HTTP status of each, and whom or what the failure concerns.

The rest follows from a row. A status of 503 has `Retry-After`, and clients repeat the call. A fleet
tries a create at another node, unless the failure concerns the request, or its outcome is unknown.
So what is wrong with the transport or the version of one node concerns that node.
A problem with the member `scope` is about that, such as a request that only this node refuses.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Scope(StrEnum):
    """The concern of a failure."""

    REQUEST = "request"
    """The request, everywhere: it fails however often it is repeated."""
    NODE = "node"
    """This node: the request fails here, and another node may fulfil it."""
    MOMENT = "moment"
    """This moment: nothing was done, and the same request may succeed here later."""
    UNKNOWN = "outcome unknown"
    """The outcome is unknown: the node may have carried out the request, or may do so yet."""


class ErrorRow(NamedTuple):
    """A row of the table."""

    scope: Scope
    status: int


ERROR_CODES = {
    "Unauthorized": ErrorRow(Scope.REQUEST, 401),
    "Forbidden": ErrorRow(Scope.REQUEST, 403),
    "UnknownKernel": ErrorRow(Scope.REQUEST, 404),
    "UnknownClaim": ErrorRow(Scope.REQUEST, 404),
    "UnknownEngine": ErrorRow(Scope.REQUEST, 404),
    "UnknownRuntime": ErrorRow(Scope.REQUEST, 404),
    "UnknownPlugin": ErrorRow(Scope.REQUEST, 404),
    "UnknownNode": ErrorRow(Scope.REQUEST, 404),
    "UnknownSlotType": ErrorRow(Scope.REQUEST, 404),
    "KernelConflict": ErrorRow(Scope.REQUEST, 409),
    "ClaimConflict": ErrorRow(Scope.REQUEST, 409),
    "Conflict": ErrorRow(Scope.REQUEST, 409),
    "SlotTypeInUse": ErrorRow(Scope.REQUEST, 409),
    "BodyTooLarge": ErrorRow(Scope.REQUEST, 413),
    "WrongNode": ErrorRow(Scope.REQUEST, 421),
    "ConfigRefused": ErrorRow(Scope.REQUEST, 422),
    "InvalidRequest": ErrorRow(Scope.REQUEST, 422),
    "InvalidSlotAmount": ErrorRow(Scope.REQUEST, 422),
    "InvalidSlotCombination": ErrorRow(Scope.REQUEST, 422),
    "CommandNotFound": ErrorRow(Scope.REQUEST, 422),
    "TooManyStreams": ErrorRow(Scope.REQUEST, 429),
    "BadRequest": ErrorRow(Scope.NODE, 400),
    "NotFound": ErrorRow(Scope.NODE, 404),
    "MethodNotAllowed": ErrorRow(Scope.NODE, 405),
    "RequestTimeout": ErrorRow(Scope.NODE, 408),
    "ExpectationFailed": ErrorRow(Scope.NODE, 417),
    "UnknownAgent": ErrorRow(Scope.NODE, 404),
    "UnknownDevice": ErrorRow(Scope.NODE, 404),
    "InsufficientResource": ErrorRow(Scope.NODE, 409),
    "UnsupportedResource": ErrorRow(Scope.NODE, 422),
    "TooManyClaims": ErrorRow(Scope.NODE, 429),
    "ImageNotFound": ErrorRow(Scope.NODE, 422),
    "RuntimeFailure": ErrorRow(Scope.NODE, 502),
    "FleetStoreRefused": ErrorRow(Scope.NODE, 502),
    "PluginUnavailable": ErrorRow(Scope.MOMENT, 503),
    "RuntimeUnavailable": ErrorRow(Scope.MOMENT, 503),
    "ImageUnavailable": ErrorRow(Scope.MOMENT, 503),
    "StateUnavailable": ErrorRow(Scope.MOMENT, 503),
    "NotReady": ErrorRow(Scope.MOMENT, 503),
    "Draining": ErrorRow(Scope.MOMENT, 503),
    "NodeUnavailable": ErrorRow(Scope.MOMENT, 503),
    "FleetStoreUnavailable": ErrorRow(Scope.MOMENT, 503),
    "RouteUnreadable": ErrorRow(Scope.MOMENT, 503),
    "Internal": ErrorRow(Scope.UNKNOWN, 500),
    "OutcomeUnknown": ErrorRow(Scope.UNKNOWN, 503),
}
