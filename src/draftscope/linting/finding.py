"""Findings of one piece of evidence each, read from files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftscope.findings import STRONGEST_FIRST, Evidence, Finding, Fix, Patch, Recovery, Strength


def finding(
    fault: str, where: Sequence[str], says: str, strength: Strength, recovery: Recovery, fix: str, *, measured: str, result: str,
    healthy: str, caveats: Sequence[str] = (), figures: Mapping[str, Any] | None = None,
    config: Mapping[str, dict[str, Any]] | None = None, patch: Patch | None = None,
) -> Finding:
    """A finding; `healthy` is what holds in a sound checkpoint."""
    evidence = Evidence(hypothesis=says, prediction=f"healthy: {healthy}", measurement=measured, result=result,
                        decides=f"{fault} if not {healthy}", figures=dict(figures or {}))
    return Finding(fault=fault, where=list(where), says=says, strength=strength, recovery=recovery, evidence=[evidence],
                   fix=Fix(says=fix, config=dict(config or {}), patch=patch), caveats=list(caveats))


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Proven ones first, otherwise as they stand; evidence about the same thing in one finding."""
    merged: list[Finding] = []
    for one in findings:
        held = next((other for other in merged if other.fault == one.fault and set(one.where) <= set(other.where)), None)
        if held is None:
            merged.append(one)
            continue
        held.evidence += [e for e in one.evidence if e not in held.evidence]
        held.caveats += [c for c in one.caveats if c not in held.caveats]
        held.fix.config |= {k: v for k, v in one.fix.config.items() if k not in held.fix.config}
    return sorted(merged, key=lambda one: STRONGEST_FIRST[one.strength])
