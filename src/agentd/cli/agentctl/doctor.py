"""Rows of `agentctl doctor`, one for each check with its findings, and the conditions of a node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from agentd.cli.output import print_text

MAX_SHOWN = 8
"""Conditions about one kind of subject, and findings of one check, that are printed."""
UNREADY_STATES = ("pending", "failed", "stopped")
BROKEN_STATES = ("gone", "unhealthy", "overcommitted")


def check_row(check: str, promise: str, *findings: str) -> dict[str, Any]:
    """Return the row of a check, which passed if it has no findings."""
    row = {"check": check, "promise": promise, "passed": not findings}
    return {**row, "findings": list(findings)}


def condition_rows(
    node: Mapping[str, Any], devices: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows for conditions without which a node works as configured."""
    runtimes = [node["runtime"], *node["other_runtimes"]]
    away = [f"runtime/{r['name']}" for r in runtimes if r["state"] == "unavailable"]
    unready = [f"plugin/{p['name']}" for p in node["plugins"] if p["state"] in UNREADY_STATES]
    broken = [
        f"device/{device['device_name']}/{device['id']}"
        for device in devices
        if device["state"] in BROKEN_STATES
    ]
    checks: Sequence[tuple[str, str, Collection[str]]] = (
        ("runtimes", "every runtime answers", away),
        ("plugins", "every plugin that is needed is ready", unready),
        ("devices", "no device is missing, unhealthy or overcommitted", set(broken)),
        ("state-dir", "the state folder can be read and written", ["state-dir"]),
        ("log", "every line of the log is written", ["log"]),
    )
    conditions = conditions_of(node)
    return [
        check_row(check, promise, *(_text(c) for c in conditions if c["about"] in subjects))
        for check, promise, subjects in checks
    ]


def print_checks(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the checks as a table, with the first findings of each."""
    from agentd.cli.tables import print_rows

    table_rows = [
        {"check": row["check"], "passed": "yes" if row["passed"] else "NO", "detail": detail}
        for row in rows
        for detail in _first_texts(row["findings"]) or [row["promise"]]
    ]
    print_rows(table_rows, ["check", "passed", "detail"])


def conditions_of(node: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the conditions of a node; an older agentd shows their texts alone."""
    texts = ({"about": "host", "reason": text, "remedy": ""} for text in node["warnings"])
    return node.get("conditions") or [*texts]


def notes_of(node: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conditions that are not findings of a row."""
    findings = {finding for row in rows for finding in row["findings"]}
    return [condition for condition in conditions_of(node) if _text(condition) not in findings]


def print_conditions(conditions: Iterable[Mapping[str, Any]]) -> None:
    """Print the first conditions about each kind of subject, and the number of the others."""
    texts_by_kind: dict[str, list[str]] = {}
    for condition in conditions:
        kind = condition["about"].rpartition("/")[0] or condition["about"]
        texts_by_kind.setdefault(kind, []).append(_text(condition))
    for kind, texts in texts_by_kind.items():
        for text in _first_texts(texts, f" about {kind}"):
            print_text(f"warning: {text}")


def _text(condition: Mapping[str, Any]) -> str:
    reason, remedy = str(condition["reason"]), condition["remedy"]
    return f"{reason} ({remedy})" if remedy else reason


def _first_texts(texts: Sequence[str], ending: str = "") -> list[str]:
    if len(texts) <= MAX_SHOWN:
        return [*texts]
    return [*texts[:MAX_SHOWN], f"{len(texts) - MAX_SHOWN} more{ending}; all with -o json"]


def print_named_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Print the claims that only a caller ends, the oldest first: one may be forgotten."""
    from agentd.cli.tables import format_age

    for claim in claims:
        if "name" in claim["holder"] and claim["state"] != "unreadable":
            text = f"claim {claim['claim_id']} of {claim['holder']['name']}"
            age = format_age(claim["created_at"])
            print_text(f"named claim: {text}, agent {claim['agent_id']}, {age} old")
