"""Text from others, without what a terminal would obey.

Labels, commands and reasons come from other teams, plugins and engines. Escape sequences in them
could rename a window, hide lines, or have a terminal type (ECMA-48, "Control functions"); marks
of direction could show text in another order (Unicode TR 36).
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


_OBEYED_OR_BROKEN = re.compile(f"[\t\n]|{_OBEYED.pattern}")


def printable(text: str) -> str:
    """Return text with control characters written out, as in Python; lines and tabs stay."""
    return _OBEYED.sub(_written_out, text)


def printable_line(text: str) -> str:
    """Return text as one line: line ends and tabs are written out like control characters."""
    return _OBEYED_OR_BROKEN.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
