"""From figures to findings: what is wrong with the data themselves, whoever reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from draftscope.findings import STRONGEST_FIRST, Evidence, Finding, Fix, Recovery, Strength
from draftscope.inspecting.meaning import READABLE, is_embedding, is_normed
from draftscope.inspecting.measure import Pass
from draftscope.inspecting.report import Entry, Group
from draftscope.target.parts import TargetParts

NOTICEABLE_SCALE = 0.02
LAST = 10**6
CLEARLY = 1.25
"""Ratio of norms from which one entry is taken for deeper than another."""


def find(found: Pass, parts: TargetParts | None = None, layers: int | None = None) -> list[Finding]:
    """Findings of one source, proven ones first.

    Args:
        parts: of the target, where one was given.
        layers: the target's number of layers, where it could be run.
    """
    findings = [*_skipped(found), *_nonfinite(found), *_widths(found, parts), *_tokens(found, parts), *_masks(found),
                *_rows(found), *_same(found), *_labels(found), *_placed(found, layers), *_last(found), *_counts(found)]
    return sorted(findings, key=lambda finding: STRONGEST_FIRST[finding.strength])


def suspect(fault: str, where: list[str], says: str, strength: Strength, recovery: Recovery, fix: str, *, measured: str,
            result: str, decides: str, caveats: list[str] | None = None, figures: dict[str, Any] | None = None) -> Finding:
    """A finding with one piece of evidence; `decides` is what holds in healthy data."""
    evidence = Evidence(hypothesis=says, prediction=f"healthy: {decides}", measurement=measured, result=result, decides=decides,
                        figures=figures or {})
    return Finding(fault=fault, where=where, says=says, strength=strength, recovery=recovery, evidence=[evidence],
                   fix=Fix(says=fix), caveats=caveats or [])


def _recovery(found: Pass) -> Recovery:
    return "needs-serving" if found.report.what == "capture" else "needs-retraining"


def _tensor(found: Pass) -> str:
    return "tensor fc_input" if found.report.what == "capture" else "tensor hidden_states"


def _skipped(found: Pass) -> Iterator[Finding]:
    said = {
        "broken": ("run-ops", "cannot be opened: cut short or no such file", "A dump that was interrupted or copied in part"),
        "layout": ("schema-width", "do not fit the format: names, ranks or dtypes", "Another writer, or another version of it"),
        "rows": ("req-mix", "hold tensors with unlike numbers of rows", "Rows are missing or belong to another request"),
    }
    for group in found.report.skipped:
        if group.cause not in said:
            continue
        fault, what, why = said[group.cause]
        yield suspect(
            fault, [f"file {name}" for name in _names(group)], f"{group.files} of {found.report.files} files {what}",
            "proven" if group.cause != "rows" else "suspected", _recovery(found), f"{why}: write these files again, or drop them",
            measured="every file opened and its tensors held against each other", result="; ".join(s.why for s in group.examples),
            decides="every file can be read", figures={"files": group.files},
        )


def _names(group: Group) -> list[str]:
    return [skip.path for skip in group.examples]


def _nonfinite(found: Pass) -> Iterator[Finding]:
    bad = [entry for entry in found.report.entries if entry.nonfinite.values]
    if not bad:
        return
    parts = [f"{e.name}: {e.nonfinite.values} values in {e.nonfinite.rows} rows of {e.nonfinite.items} "
             f"{_items(found)}, first in {e.nonfinite.first} row {e.nonfinite.first_row}" for e in bad]
    yield suspect(
        "nonfinite", [e.name for e in bad], f"NaN or Inf in {', '.join(e.name for e in bad)}", "proven", _recovery(found),
        "Find where the values overflow (float16 cannot hold the first token's state of many models; use bfloat16) or are never "
        "written; drop or rewrite these rows",
        measured="every value of every entry", result="; ".join(parts), decides="no value is NaN or Inf",
        figures={e.name: asdict(e.nonfinite) for e in bad},
    )


def _items(found: Pass) -> str:
    return "requests" if found.report.what == "capture" else "samples"


def _widths(found: Pass, parts: TargetParts | None) -> Iterator[Finding]:
    widths = found.report.widths
    if len(widths) > 1:
        counts = ", ".join(f"{shape} in {number}" for shape, number in sorted(widths.items(), key=lambda kv: -kv[1])[:6])
        yield suspect(
            "schema-width", [_tensor(found)], f"rows have {len(widths)} unlike shapes", "proven", _recovery(found),
            "Keep data of one target and one set of layers in a folder; write the odd files again",
            measured="entries x width of every file", result=counts, decides="one shape for all",
            figures=dict(list(widths.items())[:32]),
        )
    entries, width = (int(part) for part in max(widths, key=lambda shape: widths[shape]).split(" x "))
    if entries < 2 and found.report.what == "training data":
        yield suspect(
            "schema-width", [_tensor(found)], "one entry a row: slots and last state cannot both be there", "proven",
            "needs-retraining", "Store the slots, then the last state", measured="entries a row", result=f"{entries}",
            decides="at least two entries", figures={"entries": entries},
        )
    if parts is not None and width != parts.width:
        yield suspect(
            "schema-width", [_tensor(found)], f"rows are {width} wide, the target is {parts.width}", "proven", _recovery(found),
            "Take data and target that belong together", measured="width of a row against the target's hidden size",
            result=f"{width} against {parts.width}", decides="equal widths", figures={"width": width, "target": parts.width},
        )


def _tokens(found: Pass, parts: TargetParts | None) -> Iterator[Finding]:
    if found.negative_ids or (parts is not None and found.largest_id >= len(parts.embedding)):
        limit = f", the target knows 0..{len(parts.embedding) - 1}" if parts is not None else ""
        yield suspect(
            "schema-width", ["tensor token_ids"], "token ids outside the vocabulary", "proven", _recovery(found),
            "Padding ids and ids of another tokenizer do not belong into the data: strip them",
            measured="smallest and largest token id", decides="every id is one of the tokenizer's",
            result=f"{found.negative_ids} {_items(found)} with negative ids; largest id {found.largest_id}{limit}",
            figures={"negative": found.negative_ids, "largest": found.largest_id},
        )


def _masks(found: Pass) -> Iterator[Finding]:
    report = found.report
    if report.empty_masks:
        every = report.empty_masks == report.masked
        yield suspect(
            "lossmask-empty", ["tensor loss_mask"],
            f"{report.empty_masks} of {report.masked} samples have not one answer token", "proven" if every else "supported",
            "needs-retraining", "Render one sample and look for the assistant marker that the mask is built from",
            measured="sum of the loss mask of every sample", result=f"{report.empty_masks} sums are 0 of {report.masked}",
            decides="every sample trains on something",
            figures={"empty": report.empty_masks, "masked": report.masked},
        )
    if report.masked and report.full_masks == report.masked:
        yield suspect(
            "lossmask-span", ["tensor loss_mask"], "every token counts as an answer token", "suspected", "needs-retraining",
            "Mask the prompt: only what the target wrote teaches the draft what the target will write",
            measured="sum of the loss mask against the number of tokens", result=f"equal in all {report.masked} samples",
            decides="prompts are masked out", figures={"masked": report.masked},
            caveats=["right where the samples hold nothing but answers"],
        )


def _rows(found: Pass) -> Iterator[Finding]:
    # An embedding may hold a zero vector, for the padding token.
    empty = [entry for entry in found.report.entries if entry.zero_rows and not alone(entry)]
    if empty:
        yield suspect(
            "req-mix", [e.name for e in empty], "rows that hold nothing but zeros", "suspected", _recovery(found),
            "Look for rows that were never written: a prefix taken from the cache, padding, a short copy",
            measured="norm of every row", result="; ".join(f"{e.name}: {e.zero_rows} of {e.rows} rows" for e in empty),
            decides="no state of a target is zero", figures={e.name: e.zero_rows for e in empty},
        )
    for number in found.constant:
        entry = found.report.entries[number]
        yield suspect(
            "capture-alias", [entry.name], f"{entry.name} holds the same vector for unlike tokens", "supported", _recovery(found),
            "Copy the state where it is captured: a buffer that is written again later holds its last content only",
            measured="distance between rows of unlike tokens", result="none", decides="rows of unlike tokens differ",
        )


def _same(found: Pass) -> Iterator[Finding]:
    for (i, j), items in found.same.items():
        if i in found.constant and j in found.constant:
            continue
        one, other = found.report.entries[i], found.report.entries[j]
        always = items == found.compared
        yield suspect(
            "layer-set" if always else "capture-alias", [one.name, other.name],
            f"{one.name} and {other.name} are the same" + ("" if always else f" in {items} of {found.compared} {_items(found)}"),
            "supported", _recovery(found),
            "Give every slot a layer of its own" if always else "Copy states where they are captured",
            measured="bytes of every pair of entries", result=f"equal in {items} of {found.compared} {_items(found)}",
            decides="entries differ", figures={"items": items, "of": found.compared},
            caveats=["a buffer that two slots share looks the same"] if always else [],
        )


def says_embedding(label: str) -> bool:
    return "embed" in label.lower()


def layer_number(label: str) -> int | None:
    """The layer that a label names, by its own count: for order alone; None where it names none."""
    if says_embedding(label):
        return -1
    if label.strip().lower() in ("last", "last state", "last_hidden_state", "final"):
        return LAST
    found = re.fullmatch(r"\D*(?:layer|boundary)\D*(-?\d+)\D*", label, re.IGNORECASE) or re.fullmatch(r"\s*(-?\d+)\s*", label)
    return int(found.group(1)) if found else None


def alone(entry: Entry) -> bool | None:
    """Whether the entry is the embedding's, by the target where it was given, else by repeated tokens."""
    if entry.placed is not None and entry.placed.boundary is not None:
        return entry.placed.boundary == 0
    proven = is_embedding(entry)
    return entry.token_alone if proven is None else proven


def _labels(found: Pass) -> Iterator[Finding]:
    entries = found.report.entries
    for number, entry in enumerate(entries):
        is_alone = alone(entry)
        labelled = says_embedding(entry.label)
        proven = is_embedding(entry) is not None or entry.placed is not None
        how = "entry against the target" if proven else "rows of the same token against each other"
        if labelled and is_alone is False:
            yield suspect(
                "layer-set", [entry.name], f"{entry.name} is labelled “{entry.label}”, but is no embedding",
                "supported", _recovery(found),
                "Believe the states, not the label: do not rewire a server to match the name; correct the label",
                measured=how, result=f"{entry.inferred}; {entry.token_pairs} pairs of rows with the same token",
                decides="an embedding gives the same token the same vector wherever it stands",
                figures={"pairs": entry.token_pairs},
            )
        last = number == len(entries) - 1 and found.report.what == "training data"
        if is_alone and (not labelled or last):
            yield suspect(
                "layer-set", [entry.name], f"{entry.name} holds the embedding"
                + (f", not what its label “{entry.label}” says" if layer_number(entry.label) is not None else ""),
                "supported" if proven else "suspected", _recovery(found),
                "A draft takes layers' outputs; the embedding reaches it anyway. Check which layer ids the producer was given",
                measured=how, result=f"{entry.inferred}; {entry.token_pairs} pairs of rows with the same token",
                decides="a state after a layer depends on what came before", figures={"pairs": entry.token_pairs},
                caveats=[] if last else ["right where the draft was trained with the embedding in this slot"],
            )
    yield from _order(found)


def _order(found: Pass) -> Iterator[Finding]:
    """Labels against depth, slots against each other."""
    entries = found.report.entries
    numbers = [layer_number(entry.label) for entry in entries]
    places = [None if e.placed is None else e.placed.boundary for e in entries]
    known = [i for i in range(len(entries)) if numbers[i] is not None and entries[i].rank is not None]
    if any(place is not None for place in places):
        known = [i for i in known if places[i] is not None]
        depth = [float(places[i] or 0) for i in known]
        strength: Strength = "supported"
    else:
        depth = [float(entries[i].rank or 0) for i in known]
        strength = "suspected"
    claimed = [float(numbers[i] or 0) for i in known]
    wrong = [(known[a], known[b]) for a in range(len(known)) for b in range(a + 1, len(known))
             if (claimed[a] - claimed[b]) * (depth[a] - depth[b]) < 0
             and (strength == "supported" or _apart(entries[known[a]], entries[known[b]]))]
    if wrong and (strength == "supported" or found.ranks_agree):
        names = sorted({i for pair in wrong for i in pair})
        yield suspect(
            "layer-set", [entries[i].name for i in names], "the labels contradict the order of depth", strength, _recovery(found),
            "Believe the states, not the labels: find out in which order the producer stored them",
            measured="depth of every entry", decides="deeper labels stand on deeper states",
            result="; ".join(f"{entries[i].name} “{entries[i].label}”: {entries[i].inferred}" for i in names),
        )
    slots = [place for entry, place in zip(entries, places, strict=True) if entry.name != "last" and place is not None]
    if found.report.what == "training data":
        slots = slots[:-1] if places[-1] is not None else slots
    if slots != sorted(slots):
        yield suspect(
            "layer-set", [e.name for e in entries if e.name != "last"], "the slots are not in order from low to high",
            "supported", _recovery(found), "Store and concatenate slots in the order of their boundaries",
            measured="boundary of every slot", result=f"{slots}", decides="ascending boundaries", figures={"boundaries": slots},
        )


def _apart(one: Entry, other: Entry) -> bool:
    """Whether the norms differ by more than chance would have it."""
    low, high = sorted((one.norm_median or 0.0, other.norm_median or 0.0))
    return high > CLEARLY * low


def _placed(found: Pass, layers: int | None) -> Iterator[Finding]:
    """What no healthy slot shows, whatever its boundary."""
    for entry in found.report.entries:
        placed = entry.placed
        if placed is None or placed.boundary is None:
            continue
        what: tuple[str, str, str] | None = None
        if placed.kind in ("branch", "partial"):
            what = ("residual-missing", f"is {entry.inferred}, not the whole residual stream",
                    "Capture the stream after the addition")
        elif placed.lag:
            what = ("token-shift", f"holds the state of the token {abs(placed.lag)} {'later' if placed.lag > 0 else 'earlier'}",
                    "Take states and token ids from the same rows")
        elif placed.scale is not None and abs(placed.scale - 1) > NOTICEABLE_SCALE:
            what = ("scale-mult", f"is {placed.scale:.4g} times the target's state", "Store states as the target makes them")
        if what is None:
            continue
        yield suspect(
            what[0], [entry.name], f"{entry.name} {what[1]}", "proven", _recovery(found), what[2],
            measured="every place of the target on the same tokens", result=f"{entry.inferred}, median error {placed.error}",
            decides="the whole stream, of the same token, unscaled", figures=placed.model_dump(exclude={"errors"}),
        )
    if layers is None or found.report.what != "training data" or not found.report.entries:
        return
    last = found.report.entries[-1]
    if last.placed is not None and last.placed.boundary not in (None, layers):
        yield suspect(
            "layer-set", [last.name], f"the last entry is {last.inferred}, not the last state (boundary {layers})",
            "proven", "needs-retraining", "Store the state after the last layer behind the slots: the teacher is made from it",
            measured="every place of the target on the same tokens", result=last.inferred, decides=f"boundary {layers}",
        )


def _last(found: Pass) -> Iterator[Finding]:
    """The last state of training data: on the side of the norm that the format has it on, and one that the head can read."""
    entries = found.report.entries
    if found.report.what != "training data" or not entries:
        return
    last = entries[-1]
    claimed = next(iter(found.claimed)) if len(found.claimed) == 1 else "pre"
    placed = last.placed is not None and last.placed.boundary is not None
    post = last.placed.norm == "post" if placed and last.placed is not None else is_normed(last)
    if claimed is not None and post != (claimed == "post") and (placed or post):
        side, other, does = ("after", "before", "applies it") if post else ("before", "after", "does not apply it")
        yield suspect(
            "final-norm", [last.name], f"the last state was stored {side} the final norm", "proven" if placed else "supported",
            "needs-retraining", f"Store the last state {other} the final norm: the trainer {does}",
            measured="root mean square of a row divided by the norm's weights",
            decides="before the norm it varies from row to row; after it, it is 1",
            result=f"{last.rms_post:.3f}" if last.rms_post is not None else "", figures={"rms": last.rms_post},
        )
    reads = [max(e.text_pre or 0.0, e.text_post or 0.0) for e in entries]
    if last.placed is None and last.text_pre is not None and max(reads) >= READABLE and reads[-1] < max(reads) / 2:
        best = entries[reads.index(max(reads))]
        yield suspect(
            "layer-set", [last.name], f"the target's head reads the text from {best.name}, not from the last entry", "supported",
            "needs-retraining", "Store the state after the last layer behind the slots",
            measured="share of next tokens that the head gives", decides="the last state reads best",
            result="; ".join(f"{e.name} {100 * r:.0f} %" for e, r in zip(entries, reads, strict=True)),
        )


def _counts(found: Pass) -> Iterator[Finding]:
    if found.contradictions:
        yield suspect(
            "metric", ["tensor accepted_counts"], "accepted rows and accepted counts disagree", "suspected", "needs-serving",
            "A step with accepted count A has A + 1 accepted rows, the bonus token first: check what is counted, what marked",
            measured="accepted rows of every step but the last", result=f"{found.contradictions} of {found.steps} steps differ",
            decides="accepted rows = accepted count + 1",
            figures={"steps": found.steps, "differ": found.contradictions},
        )
