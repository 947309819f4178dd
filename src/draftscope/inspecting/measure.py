"""One pass over a source: every figure that inspect prints of samples or traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.inspecting.depth import TokenTest, rank_by_depth
from draftscope.inspecting.figures import Entry, Group, Inspected, Skip
from draftscope.inspecting.rows import row_figures, same_entries, short_dtype
from draftscope.states.folder import FileSource, turned_round
from draftscope.states.places import Unreachable
from draftscope.states.types import Sample, Source, Trace

TOKEN_TEST_ITEMS = 64
SHAPES = 8
"""Row shapes whose figures are kept apart; more than one is a finding already."""
CLAIMS_SHOWN = 24


@dataclass(slots=True)
class Slot:
    """Figures of one entry while they are gathered."""

    entry: Entry
    total: float = 0.0
    finite: int = 0
    medians: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Shape:
    """Figures of the items whose rows have one shape; figures of unlike shapes don't add up."""

    slots: list[Slot]
    test: TokenTest
    same: Counter[tuple[int, int]] = field(default_factory=Counter)
    items: int = 0


@dataclass(slots=True)
class Pass:
    """What a pass over a source gave. Entries are those of the most common row shape.

    Attributes:
        report: figures for people and JSON.
        same: slots that hold the same bytes, and in how many of `compared` items.
        constant: slots whose rows are all the same.
        ranks_agree: norm and token share give the same order of depth.
        negative_ids, contradictions: items with negative token ids; verify steps whose accepted rows and counts disagree.
        largest_id: largest token id seen.
        claimed: samples by the side of the final norm on which format or file says the last state is (None = it does not say).
        kept: the first items, for what needs them again.
    """

    report: Inspected
    same: Counter[tuple[int, int]] = field(default_factory=Counter)
    compared: int = 0
    constant: list[int] = field(default_factory=list)
    ranks_agree: bool = True
    negative_ids: int = 0
    largest_id: int = -1
    steps: int = 0
    accepted: int = 0
    contradictions: int = 0
    rows_by_phase: Counter[str] = field(default_factory=Counter)
    kept: list[Sample | Trace] = field(default_factory=list)
    claimed: Counter[str | None] = field(default_factory=Counter)


def measure(source: Source, *, samples: int = 0, width: int | None = None, keep: int = 16,
            on_item: Callable[[], None] | None = None) -> Pass:
    """Read a source once.

    Args:
        samples: read at most this many items, evenly spread; 0 = all.
        width: the target's width, where it is known: tells a capture's number of slots.
        keep: how many items to hand back.

    Raises:
        DraftscopeError: nothing in it can be read.
    """
    traces = source.kind == "traces"
    report = Inspected(path=str(source.path), what="capture" if traces else "training data", format=source.format,
                       chosen=source.chosen, files=len(source))
    found = Pass(report)
    shapes: dict[str, Shape] = {}
    for item in _chosen(source, samples):
        if on_item is not None:
            on_item()
        report.items += 1
        states, token_ids, names, labels, phase = _rows_of(item, source, width, found)
        shape = f"{states.shape[1]} x {states.shape[2]}"
        report.widths[shape] = report.widths.get(shape, 0) + 1
        report.tokens += len(token_ids)
        found.negative_ids += bool((token_ids < 0).any())
        found.largest_id = max(found.largest_id, int(token_ids.max()))
        if isinstance(item, Sample):
            _mask(item, report)
            found.claimed[item.claimed_norm] += 1
        else:
            _steps(item, found)
        if len(found.kept) < keep:
            found.kept.append(item)
        if shape not in shapes:
            if len(shapes) == SHAPES:
                continue
            slots = [Slot(Entry(name=name, label=label)) for name, label in zip(names, labels, strict=True)]
            shapes[shape] = Shape(slots, TokenTest(len(slots), states.dtype))
        report.read += 1
        _entries(item.name, states, token_ids, phase, shapes[shape])
    if report.items == 0:
        raise DraftscopeError("none of the files can be read", where=str(source.path))
    _finish(found, max(shapes.values(), key=lambda shape: shape.items))
    _remarks(source, report, samples)
    return found


def _chosen(source: Source, samples: int) -> Iterator[Any]:
    if samples <= 0 or len(source) <= samples or not isinstance(source, FileSource):
        yield from source
        return
    for position in torch.linspace(0, len(source) - 1, samples).long().tolist():
        try:
            yield from source.items(position)
        except Unreachable:
            raise
        except DraftscopeError as error:
            source.skip(position, error)


def slots_of(trace: Trace, width: int | None) -> tuple[int, str]:
    """How many slots a capture's rows have, and how that is known."""
    total = int(trace.fc_input.shape[1])
    if width is not None and total % width == 0:
        return total // width, f"target is {width} wide"
    if trace.last_hidden is not None and total % int(trace.last_hidden.shape[1]) == 0:
        return total // int(trace.last_hidden.shape[1]), f"last_hidden is {trace.last_hidden.shape[1]} wide"
    ids = trace.meta.get("layer_ids")
    if isinstance(ids, list) and ids and total % len(ids) == 0:
        return len(ids), "as many as layer_ids in the metadata"
    return (3, "assumed") if total % 3 == 0 else (1, "not told apart: the width is no multiple of 3")


def _rows_of(item: Sample | Trace, source: Source, width: int | None, found: Pass) -> tuple[
    Tensor, Tensor, list[str], list[str], Tensor | None
]:
    """States [T, S, Ht] (of a trace: accepted rows), token ids [T], names and labels of the slots, phase [T] of a trace."""
    if isinstance(item, Sample):
        states = item.states
        return states, item.token_ids, [f"entry {i}" for i in range(states.shape[1])], list(item.labels), None
    count, why = slots_of(item, width)
    found.report.facts.setdefault("slots", f"{count} ({why})")
    kept = item.accepted
    states = item.fc_input[kept].unflatten(1, (count, -1))
    names = [f"slot {i}" for i in range(count)]
    claimed = item.meta.get("layer_ids")
    labels = [f"layer id {i}" for i in claimed] if isinstance(claimed, list) and len(claimed) == count else [""] * count
    if item.last_hidden is not None and item.last_hidden.shape[1] == states.shape[2]:
        states = torch.cat([states, item.last_hidden[kept][:, None].to(states.dtype)], 1)
        names, labels = [*names, "last"], [*labels, ""]
    phase = None if item.phase is None else item.phase[kept]
    if not bool(kept.any()):
        return item.fc_input[:1].unflatten(1, (count, -1)), item.token_ids[:1], names[:count], labels[:count], None
    return states, item.token_ids[kept], names, labels, phase


def _mask(sample: Sample, report: Inspected) -> None:
    if sample.loss_mask is None:
        return
    report.masked += 1
    answers = int(sample.loss_mask.sum())
    report.answer_tokens = (report.answer_tokens or 0) + answers
    report.empty_masks += answers == 0
    report.full_masks += answers == len(sample.loss_mask)


def _steps(trace: Trace, found: Pass) -> None:
    """Accept counts, and whether they agree with the accepted rows (the last step may be cut by a budget)."""
    found.rows_by_phase["accepted"] += int(trace.accepted.sum())
    found.rows_by_phase["rejected"] += int((~trace.accepted).sum())
    if trace.phase is not None:
        found.rows_by_phase["prefill"] += int((trace.phase == 0).sum())
        found.rows_by_phase["verify"] += int((trace.phase != 0).sum())
    if trace.accepted_counts is None:
        return
    steps = len(trace.accepted_counts)
    found.steps += steps
    found.accepted += int(trace.accepted_counts.clamp(min=0).sum())
    if trace.step is None:
        return
    own = trace.step[(trace.step >= 0) & (trace.step < steps) & trace.accepted]
    rows = torch.bincount(own, minlength=steps)[: steps - 1]
    found.contradictions += int((rows != trace.accepted_counts[: steps - 1] + 1).sum())


def _entries(name: str, states: Tensor, token_ids: Tensor, phase: Tensor | None, shape: Shape) -> None:
    figures = row_figures(states)
    shape.items += 1
    first_median = figures.norms.where(figures.ordinary, torch.nan).nanmedian(0).values
    for s, slot in enumerate(shape.slots):
        entry = slot.entry
        norms, bad, ordinary = figures.norms[:, s], figures.bad[:, s], figures.ordinary[:, s]
        dtype = short_dtype(states.dtype)
        entry.dtypes[dtype] = entry.dtypes.get(dtype, 0) + 1
        entry.rows += len(norms)
        entry.sinks += int(figures.sinks[:, s].sum())
        entry.zero_rows += int((norms == 0).sum())
        if bad.any():
            held = entry.nonfinite
            if not held.items:
                held.first, held.first_row = name, int(bad.nonzero()[0])
            held.values += int(figures.bad_values[s])
            held.rows += int(bad.sum())
            held.items += 1
        slot.total += float(norms[~bad].sum())
        slot.finite += int((~bad).sum())
        if ordinary.any():
            slot.medians.append(float(first_median[s]))
        if not bad[0]:
            slot.firsts.append(float(norms[0]))
        if phase is not None:
            for value, said in ((0, "prefill"), (1, "verify")):
                chosen = norms[ordinary & (phase == value)]
                if len(chosen):
                    slot.phases.setdefault(said, []).append(float(chosen.median()))
    shape.same.update(same_entries(states, figures.norms))
    if shape.items <= TOKEN_TEST_ITEMS:
        shape.test.update(token_ids, states, figures)


def _finish(found: Pass, shape: Shape) -> None:
    test, found.same, found.compared = shape.test, shape.same, shape.items
    for s, slot in enumerate(shape.slots):
        entry = slot.entry
        entry.norm_mean = slot.total / slot.finite if slot.finite else None
        entry.norm_median = _median(slot.medians)
        entry.norm_first = _median(slot.firsts)
        entry.norm_by_phase = {name: float(torch.tensor(held).median()) for name, held in slot.phases.items()}
        entry.token_alone, entry.token_pairs, entry.token_share = test.alone(s), int(test.pairs[s]), test.share(s)
        if test.constant(s):
            found.constant.append(s)
        found.report.entries.append(entry)
    entries = found.report.entries
    ranks, found.ranks_agree = rank_by_depth([e.norm_median for e in entries], [e.token_share for e in entries])
    for entry, rank in zip(entries, ranks, strict=True):
        entry.rank = rank
    if found.report.what == "capture":
        _acceptance(found)


def _acceptance(found: Pass) -> None:
    facts = found.report.facts
    facts["rows"] = dict(found.rows_by_phase)
    facts["verify_steps"] = found.steps
    facts["accepted_tokens"] = found.accepted
    facts["accept_length"] = found.accepted / found.steps + 1 if found.steps else None


def _median(values: list[float]) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else None


def _remarks(source: Source, report: Inspected, samples: int) -> None:
    groups: dict[str, Group] = {}
    for skip in source.skipped:
        group = groups.setdefault(skip.cause, Group(cause=skip.cause, files=0))
        group.files += 1
        if len(group.examples) < 5:
            group.examples.append(Skip(path=skip.path, why=skip.why, row=skip.row, cause=skip.cause))
    report.skipped = list(groups.values())
    report.notes = list(getattr(source, "notes", []))
    if isinstance(source, FileSource) and len(source) > 1:
        report.facts["order"] = source.order
        if (turned := turned_round(source.files)) is not None:
            report.facts["order_as_text"] = [turned[1].name, turned[0].name]
    if samples and report.files > samples:
        report.notes.append(f"states of {report.read} of {report.files} files were read, evenly spread (--samples 0 reads all)")
    for key, value in list(source.meta.items())[:CLAIMS_SHOWN]:
        report.claims[str(key)] = value

