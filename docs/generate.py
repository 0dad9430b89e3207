"""Make the pages of the reference that follow from the code: `python docs/generate.py`.

A test compares each page with what this makes.
"""

from pathlib import Path

from agentd.core.kernel import LIVE, MOVES, OBSERVATIONS, STARTING, KernelState, Sight

STATES = Path(__file__).parent / "reference" / "states.md"


def states_page() -> str:
    """Return the page of kernel states: a drawing and two tables, from the tables of the code."""
    lines = [
        "# Kernel states",
        "",
        "Made from `agentd.core.kernel` by `docs/generate.py`. Every change of a kernel goes through one of two",
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
        f"| in state | {' | '.join(f'seen {sight}' for sight in Sight)} |",
        f"|---{'|---' * len(Sight)}|",
    ]
    for state, found in OBSERVATIONS.items():
        if found:
            cells = (f"`{found[sight]}`" for sight in Sight)
            lines.append(f"| `{state}` | {' | '.join(cells)} |")
    starting = ", ".join(f"`{state}`" for state in KernelState if state in STARTING)
    live = ", ".join(f"`{state}`" for state in KernelState if state in LIVE)
    lines += [
        "",
        f"Starting: {starting}; nothing is found before `creating`, since no runtime was asked. Live: {live}.",
        "An `unreadable` sight is a kernel that lives and whose record cannot be read.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STATES.write_text(states_page())
