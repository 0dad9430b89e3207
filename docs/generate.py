"""Make the pages of the reference that follow from the code: `python docs/generate.py`.

A test compares each page with what this makes.
"""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path

from agentd import plugin_api
from agentd.core.kernel.states import LIVE, MOVES, OBSERVATIONS, STARTING, KernelState, Observed

STATES = Path(__file__).parent / "reference" / "states.md"
PLUGIN_API = STATES.parents[1] / "plugins" / "plugin-api.md"


def states_page() -> str:
    """Return the page of kernel states: a drawing and two tables, from the tables of the code."""
    lines = [
        "# Kernel states",
        "",
        "Made from `agentd.core.kernel.states` by `docs/generate.py`. Every change of a kernel goes through one of two",
        "tables: what agentd does (`MOVES`, solid) and what it finds (`OBSERVATIONS`, dotted here by what is seen).",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> preparing",
        *(f"    {a} --> {b}" for a in KernelState for b in sorted(MOVES[a])),
        *(
            f"    {state} --> {after}: seen {sight}"
            for state in KernelState
            for sight, after in OBSERVATIONS[state].items()
            if after is not state
        ),
        *(f"    {state} --> [*]" for state in ("terminated", "failed", "lost")),
        "```",
        "",
        "Devices are charged to a kernel in every state but `terminated`, `failed` and `lost`.",
        "",
        "## What agentd does",
        "",
        "| from | to |",
        "|---|---|",
        *(
            f"| `{state}` | {', '.join(f'`{item}`' for item in sorted(moves))} |"
            for state, moves in MOVES.items()
            if moves
        ),
        "",
        "A stop that failed leaves the kernel as it was; deleting drops it from any state in which nothing lives.",
        "",
        "## What agentd finds",
        "",
        f"| in state | {' | '.join(f'seen {sight}' for sight in Observed)} |",
        f"|---{'|---' * len(Observed)}|",
    ]
    for state, found in OBSERVATIONS.items():
        if found:
            cells = (f"`{found[sight]}`" for sight in Observed)
            lines.append(f"| `{state}` | {' | '.join(cells)} |")
    starting = ", ".join(f"`{state}`" for state in KernelState if state in STARTING)
    live = ", ".join(f"`{state}`" for state in KernelState if state in LIVE)
    lines += [
        "",
        f"Starting: {starting}; nothing is found before `creating`, since no runtime was asked. Live: {live}.",
        "An `unreadable` sight is a kernel that lives and whose record cannot be read.",
    ]
    return "\n".join(lines) + "\n"


def plugin_api_page() -> str:
    """Return the page of the plugin API: every name of `agentd.plugin_api`, from its docstrings."""
    lines = [
        "# The plugin API",
        "",
        "Made from `agentd.plugin_api` by `docs/generate.py`: all of agentd that a plugin may import.",
        "How to write one: [write a plugin](write-a-plugin.md).",
    ]
    values = {name: getattr(plugin_api, name) for name in plugin_api.__all__}
    for name, value in sorted(values.items(), key=lambda item: (callable(item[1]), item[0])):
        lines += ["", f"## `{name}`", ""]
        if inspect.isfunction(value):
            lines += _function(name, value)
        elif not inspect.isclass(value):
            lines.append(f"`{value!r}`")
        else:
            lines.append(_said(value))
            lines += _fields(value) if is_dataclass(value) else _methods(value)
    return "\n".join(lines) + "\n"


def _said(value: object) -> str:
    """Return a docstring, its lists and examples as they stand."""
    return textwrap.dedent(inspect.getdoc(value) or "").replace("\nRaises:\n", "\nRaises:\n\n")


def _function(name: str, function: object) -> list[str]:
    return [f"```python\n{name}{inspect.signature(function)}\n```", "", _said(function)]  # type: ignore[arg-type]


def _fields(value: type) -> Iterator[str]:
    yield from ("", "| member | type | default |", "|---|---|---|")
    for field in fields(value):
        kind = str(field.type).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {_default(field)} |"


def _default(field: Field[object]) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()!r}`"
    return "required" if field.default is MISSING else f"`{field.default!r}`"


def _methods(value: type) -> Iterator[str]:
    for name, member in list(vars(value).items()):
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield from ("", f"### `{name}`", "", *_function(name, function))
        elif name in getattr(value, "__annotations__", ()):
            yield from ("", f"### `{name}`", "", f"`{value.__annotations__[name]} = {member!r}`")


if __name__ == "__main__":
    STATES.write_text(states_page())
    PLUGIN_API.write_text(plugin_api_page())
