"""Untrusted text without control characters for terminals.

Labels, commands and reasons come from other teams, plugins and engines. Escape sequences in them
could rename a window, hide lines, or make a terminal type (ECMA-48, "Control functions");
directional marks could reorder the text (Unicode TR 36).
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


_CONTROL_OR_BREAK = re.compile(f"[\t\n]|{_CONTROL.pattern}")


def printable(text: str) -> str:
    """Escape control characters as in Python; newlines and tabs stay."""
    return _CONTROL.sub(_escape, text)


def printable_line(text: str) -> str:
    """Escape control characters, newlines and tabs, so that the text is one line."""
    return _CONTROL_OR_BREAK.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
