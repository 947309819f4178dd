"""What an entry is, told with the target: proven from its parts, placed by a sweep where its weights are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.compare.placed import as_finding
from draftscope.compare.placement import Placer
from draftscope.errors import DraftscopeError
from draftscope.inspecting.measure import Pass, slots_of
from draftscope.inspecting.report import Entry
from draftscope.inspecting.rows import row_figures
from draftscope.states.places import Place, Remote
from draftscope.states.types import Sample, Trace
from draftscope.target.model import Target, load_target
from draftscope.target.parts import TargetParts, read_parts, tensor_files
from draftscope.target.sweep import sweep

PARTS_ROWS = 1024
HEAD_ROWS = 256
SWEEP_TOKENS = 2048
SWEEP_LENGTH = 512
PARTS_ONLY = "boundary 0 and the last state are tested, nothing between"


@dataclass(slots=True)
class Knowledge:
    """The target as far as it is at hand: parts always, the rest where the folder has the weights."""

    parts: TargetParts
    target: Target | None
    remark: str = ""


def know(folder: Place) -> Knowledge:
    """Read the parts of a target, and load it where all of its weights are there.

    Raises:
        DraftscopeError: no parts there.
    """
    parts = read_parts(folder)
    if isinstance(folder, Remote):
        return Knowledge(parts, None, f"of a target behind a URL only the parts are read: {PARTS_ONLY}")
    files = tensor_files(folder)
    if not any("layers." in name for name in files) or not all(file.is_file() for file in files.values()):
        return Knowledge(parts, None, f"only the target's parts are there: {PARTS_ONLY}")
    try:
        return Knowledge(parts, load_target(folder))
    except DraftscopeError as error:
        return Knowledge(parts, None, f"the target could not be run ({error}): {PARTS_ONLY}")


def place_entries(found: Pass, known: Knowledge, on_tokens: Callable[[int], None] | None = None) -> None:
    """Fill `embedding_*`, `text_*` and `placed` of the entries, from the items kept.

    Items whose width is not the target's are passed over.
    """
    entries = found.report.entries
    used = [(item.name, token_ids, states, mask) for item in found.kept
            for token_ids, states, mask in _usable(item, known.parts, len(entries))]
    if not used:
        return
    with torch.inference_mode():
        _by_parts(entries, used, known.parts)
        if known.target is not None:
            placer = Placer(rows=SWEEP_TOKENS)
            chosen = list(_within(used, known.target.parts.embedding.shape[0]))
            by_name = {name: states for name, _, states in chosen}
            for swept in sweep(known.target, [(name, ids) for name, ids, _ in chosen], partial=True, on_tokens=on_tokens):
                placer.update(by_name[swept.name], swept)
            for entry, placed in zip(entries, placer.result(), strict=False):
                entry.placed = as_finding(placed, entry.label)


def _usable(item: Sample | Trace, parts: TargetParts, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Token ids [T], states [T, S, Ht] and answer rows [T] of an item that fits the target."""
    if isinstance(item, Sample):
        token_ids, states, mask = item.token_ids, item.states, item.loss_mask
    else:
        slots, _ = slots_of(item, parts.width)
        kept = item.accepted
        token_ids, states = item.token_ids[kept], item.fc_input[kept].unflatten(1, (slots, -1))
        if item.last_hidden is not None and item.last_hidden.shape[1] == states.shape[2]:
            states = torch.cat([states, item.last_hidden[kept][:, None].to(states.dtype)], 1)
        mask = None if item.phase is None else item.phase[kept] == 1
    if len(token_ids) and states.shape[1:] == (count, parts.width):
        yield token_ids, states, mask


def _within(used: list[tuple[str, Tensor, Tensor, Tensor | None]], vocab: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Beginnings of the items (attention is causal), up to the budget of tokens; ids that the target lacks end one."""
    left = SWEEP_TOKENS
    for name, token_ids, states, _ in used:
        foreign = ((token_ids < 0) | (token_ids >= vocab)).nonzero()
        end = min(SWEEP_LENGTH, left, int(foreign[0]) if len(foreign) else len(token_ids))
        if end > 0:
            yield name, token_ids[:end], states[:end].float()
            left -= end


def _by_parts(entries: list[Entry], used: list[tuple[str, Tensor, Tensor, Tensor | None]], parts: TargetParts) -> None:
    per_item = max(8, PARTS_ROWS // len(used))
    errors: list[list[Tensor]] = [[] for _ in entries]
    factors: list[list[Tensor]] = [[] for _ in entries]
    rms: list[list[Tensor]] = [[] for _ in entries]
    scale = parts.norm_weight.float() + parts.norm_offset
    for _, token_ids, states, _ in used:
        figures = row_figures(states)
        rows = _spread(((token_ids >= 0) & (token_ids < len(parts.embedding))).nonzero().squeeze(-1), per_item)
        if len(rows) == 0:
            continue
        wanted = parts.embedding[token_ids[rows]].double()
        for s in range(len(entries)):
            usable = figures.ordinary[rows, s]
            x, e = states[rows[usable], s].double(), wanted[usable]
            factors[s].append((x * e).sum(-1) / e.square().sum(-1).clamp_min(1e-30))
            errors[s].append((x - factors[s][-1][:, None] * e).norm(dim=-1) / x.norm(dim=-1))
            rms[s].append((x.float() / scale).square().mean(-1).sqrt())
    for s, entry in enumerate(entries):
        if sum(map(len, factors[s])) == 0:
            continue
        factor = torch.cat(factors[s])
        typical = factor.median()
        # One constant factor: what a row's own factor adds to its error counts too.
        spread = ((factor - typical) / typical.abs().clamp_min(1e-30)).abs()
        entry.embedding_factor = float(typical)
        entry.embedding_error = float(torch.hypot(torch.cat(errors[s]), spread).median())
        squares = torch.cat(rms[s])
        entry.rms_post = float(squares.median())
        entry.rms_spread = float((squares - entry.rms_post).abs().quantile(0.9))
    rows_left = HEAD_ROWS
    hits = torch.zeros(len(entries), 2)
    looked = torch.zeros(len(entries))
    for _, token_ids, states, mask in used:
        answers = torch.arange(len(token_ids) - 1)
        if mask is not None and bool(mask[1:].any()):
            answers = mask[1:].nonzero().squeeze(-1)
        rows = _spread(answers, min(rows_left, max(8, HEAD_ROWS // len(used))))
        rows_left -= len(rows)
        for s in range(len(entries)):
            x = states[rows, s].float()
            finite = x.isfinite().all(-1)
            if not finite.any():
                continue
            following = token_ids[rows[finite] + 1]
            for how, state in enumerate((parts.final_norm(x[finite]), x[finite])):
                hits[s, how] += (parts.logits(state).argmax(-1) == following).sum()
            looked[s] += len(following)
    for s, entry in enumerate(entries):
        if looked[s] > 0:
            entry.text_pre, entry.text_post = (hits[s] / looked[s]).tolist()


def _spread(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) <= count else rows[torch.linspace(0, len(rows) - 1, max(count, 0)).long()]
