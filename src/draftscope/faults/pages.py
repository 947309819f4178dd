"""docs/faults.md and docs/faults/*.md, written from what each fault says of itself (`make docs-faults`)."""

from __future__ import annotations

import inspect
import re

from draftscope.faults import FAULTS
from draftscope.faults.base import Fault

OPTION = re.compile(r"--[a-z][a-z-]*")
ELSEWHERE = {
    "UNRESOLVED": "not a class but the reports without an established cause; a diagnosis says `undecided` there, with what to "
    "measure",
}
"""Classes of the catalogue that are no fault here, and why."""


def index() -> str:
    """The list of all faults and variants: what each leaves behind, where, and what it could be taken for."""
    variants = sum(len(fault.variants) for fault in FAULTS)
    lines = [
        "# Faults", "",
        f"Every cause that `draftscope diagnose` names: {len(FAULTS)} classes, {variants} variants that the tests and the drill "
        "make where the real ones act. Classes and reports are from public issues of the engines and trainers. The rung is "
        "the first that falls (see [the ladder](design.md#one-thing-changes-per-comparison)); \"none\" where acceptance "
        "never shows it.", "",
        "Written from the code (`make docs-faults`): what stands here is what the rules say.", "",
        "| fault | what | verdict | variants | first rung | given by |", "|---|---|---|---|---|---|",
    ]
    for fault in sorted(FAULTS, key=lambda f: f.id):
        page = fault.page
        rungs = sorted({trace.rung for trace in page.traces.values()}) if page else []
        given = sorted({option for trace in page.traces.values() for option in OPTION.findall(trace.input)}) if page else []
        lines.append(f"| [{fault.id}](faults/{fault.id}.md) | {fault.title} | {fault.verdict} | {len(fault.variants)} | "
                     f"{', '.join(rungs)} | {', '.join(given)} |")
    for fault in sorted(FAULTS, key=lambda f: f.id):
        lines += ["", f"## {fault.id}", "", *_table(fault)]
        if fault.page and fault.page.unseen:
            lines += ["", "Not recognised, or not made here:", "", *(f"- {k}: {v}" for k, v in fault.page.unseen.items())]
    lines += ["", "## Not a fault here", "", *(f"- {name}: {why}" for name, why in ELSEWHERE.items()), ""]
    return "\n".join(lines)


def page(fault: Fault) -> str:
    """One fault's own page."""
    lines = [f"# {fault.id}: {fault.title}", "", inspect.cleandoc(type(fault).__doc__ or "").replace("\n", " "), ""]
    about = fault.page
    if about is None:
        return "\n".join(lines)
    lines += ["## What one sees", "", about.symptom, "", f"Leads to the verdict `{fault.verdict}` when it comes first.", "",
              "## Variants and their evidence", "", *_table(fault), "", "## What it could be taken for", "",
              *(f"- [{other}]({other}.md): {how}" for other, how in about.lookalikes.items())]
    if about.unseen:
        lines += ["", "## What is not recognised, or not made here", "", *(f"- {k}: {v}" for k, v in about.unseen.items())]
    if about.reports:
        lines += ["", "## Public reports", "", *(f"- {report}" for report in about.reports)]
    lines += ["", f"`draftscope diagnose ... --explain {fault.id}` says of your own files why it was, or was not, named.", ""]
    return "\n".join(lines)


def _table(fault: Fault) -> list[str]:
    if fault.page is None:
        return ["(no page)"]
    rows = ["| variant | what goes wrong | given | shows | first rung |", "|---|---|---|---|---|"]
    for name in fault.variants:
        trace = fault.page.traces[name]
        cells = (name, trace.says, trace.input, trace.shows, trace.rung)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows
