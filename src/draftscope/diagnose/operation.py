"""The training data as a dump: copies, gaps, broken files, room on the disk; against the conversations it was made from."""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftscope.diagnose.case import Selected, Text
from draftscope.errors import DraftscopeError
from draftscope.faults.facts_data import OpsFacts, TemplateFacts
from draftscope.pipeline.conversations import Conversation, Renderer, read_lines
from draftscope.pipeline.turns import Ids
from draftscope.text import visible

LINES = 20_000
HEAD = 32
"""Tokens by which a text is looked up."""
GRAM, ALIKE = 4, 0.5
"""Tokens of a piece, and share of a text's pieces in another from which their contents are the same."""
RANK = re.compile(r"training_state_rank(\d{1,6})\.pt")
WORLD = re.compile(r"\b(?:world_size|WORLD_SIZE|nproc_per_node)['\"]?\s*[=:]\s*(\d{1,6})")


def ops_facts(selected: Selected) -> OpsFacts:
    """Copies among all samples read, files cut short, gaps in their numbers."""
    facts = OpsFacts(samples=len(selected.texts))
    seen: set[bytes] = set()
    for text in selected.texts:
        key = text.token_ids.numpy().tobytes()
        facts.twice += key in seen
        seen.add(key)
    broken = [skip for skip in selected.source.skipped if skip.cause == "broken"]
    facts.broken, facts.first_broken = len(broken), f"{broken[0].path}: {broken[0].why}" if broken else ""
    numbers = sorted({text.index for text in selected.texts if text.index >= 0})
    if len(numbers) > 1:
        facts.span = numbers[-1] + 1
        gaps = [(b - a - 1, a + 1) for a, b in zip([-1, *numbers], numbers, strict=False)]
        longest = max(gaps)
        facts.gap = (longest[1], longest[0]) if longest[0] else None
    if selected.sequences:
        first = selected.sequences[0]
        entries = first.features.shape[1] + (first.last is not None)
        facts.bytes_per_token = int(entries * first.features.shape[2] * first.features.element_size())
    return facts


def compare_conversations(path: Path, texts: Sequence[Text], folder: Path | None, tokenizer: Any, facts: TemplateFacts,
                          ops: OpsFacts, *, complete: bool = True) -> str:
    """Samples against the conversations that they were made from, line by line, into `facts` and `ops`.

    Args:
        complete: the texts are those of all samples.

    Returns:
        What was done, in a sentence.

    Raises:
        DraftscopeError: the file cannot be read or holds no conversation.
    """
    def renderer() -> Renderer:
        if tokenizer is None:
            raise DraftscopeError("conversations of messages are rendered by the target's template, and no target is given",
                                  where=str(path), remedy="Give --target, or lines of token ids")
        return Renderer(tokenizer)

    lines: dict[int, Ids] = {}
    unusable = 0
    for line in islice(read_lines(path, renderer), LINES):
        if isinstance(line, Conversation):
            lines[line.index] = line.token_ids.numpy().astype(np.int64)
        else:
            unusable += 1
    if not lines:
        raise DraftscopeError("holds no conversation that can be rendered", where=str(path),
                              remedy='A line is {"messages": [...]} or {"token_ids", "loss_mask"}')
    held = {text.index: text.token_ids.numpy() for text in texts if text.index >= 0}
    if held:
        _line_by_line(held, lines, facts, tokenizer)
        _missing(held, lines, ops)
        if complete:
            ops.behind = sum(index > max(held) for index in lines)
    if folder is not None and len(lines) + unusable < LINES:
        ops.tokens_needed = sum(len(ids) for index, ids in lines.items() if index not in held and index > max(held, default=-1))
        ops.free = shutil.disk_usage(folder).free
    return (f"conversations: {len(lines)} lines read, {unusable} not usable; {facts.compared} compared with their samples, "
            f"{facts.differing} differ, {facts.moved_lines} are another line's")


def _line_by_line(held: dict[int, Ids], lines: dict[int, Ids], facts: TemplateFacts, tokenizer: Any) -> None:
    heads: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, ids in lines.items():
        heads[ids[:HEAD].tobytes()].append(index)
    moved: Counter[int] = Counter()
    for index, ids in held.items():
        line = lines.get(index)
        if line is None and index > max(lines):
            continue
        facts.compared += 1
        if line is not None and _begins(line, ids):
            continue
        others = [j for j in heads.get(ids[:HEAD].tobytes(), []) if _begins(lines[j], ids)]
        if others:
            facts.moved_lines += 1
            moved.update(j - index for j in others)
        elif line is not None:
            facts.differing += 1
            facts.contents_differ += not _alike(line, ids)
            facts.first_difference = facts.first_difference or _where(index, line, ids, tokenizer)
    if moved:
        by, times = moved.most_common(1)[0]
        facts.moved_by = by if times >= 0.5 * facts.moved_lines else None


def _begins(line: Ids, sample: Ids) -> bool:
    """Whether a sample is its line, cut at most."""
    return len(sample) <= len(line) and bool(np.array_equal(line[: len(sample)], sample))


def _alike(line: Ids, sample: Ids) -> bool:
    """Whether a text's pieces are in another: the same contents, whatever stands round them."""
    pieces = {tuple(line[i : i + GRAM].tolist()) for i in range(len(line) - GRAM + 1)}
    known = {tuple(sample[i : i + GRAM].tolist()) for i in range(len(sample) - GRAM + 1)}
    return len(pieces & known) >= ALIKE * max(min(len(pieces), len(known)), 1)


def _where(index: int, line: Ids, sample: Ids, tokenizer: Any) -> str:
    common = min(len(line), len(sample))
    at = int((line[:common] != sample[:common]).argmax()) if bool((line[:common] != sample[:common]).any()) else common
    pieces = [ids[max(0, at - 4) : at + 8] for ids in (sample, line)]
    shown = [visible(str(tokenizer.decode(p)), 80) if tokenizer is not None else str(p.tolist()) for p in pieces]
    return f"line {index}, token {at}: the sample has “{shown[0]}”, the rendering “{shown[1]}”"


def _missing(held: dict[int, Ids], lines: dict[int, Ids], ops: OpsFacts) -> None:
    """Usable lines without a sample, up to the last that has one; only a run of them speaks of something lost."""
    within = [index for index in lines if index <= max(held)]
    lacking = sorted(index for index in within if index not in held)
    ops.expected = len(within)
    runs: list[tuple[int, int]] = []
    for index in lacking:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    longest = max(runs, key=lambda run: run[1], default=None)
    # A selection handed over leaves many gaps; something lost leaves few and long ones.
    if longest is not None and longest[1] >= 0.5 * len(lacking) and len(lacking) < 0.5 * len(within):
        ops.missing, ops.gap = len(lacking), longest


def ranks_of(paths: Sequence[Path], ops: OpsFacts) -> None:
    """State files by rank in a run's folders, and the number of ranks that its files name."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        by_folder: defaultdict[Path, set[int]] = defaultdict(set)
        for file in islice(folder.rglob("training_state_rank*.pt"), 4096):
            if found := RANK.fullmatch(file.name):
                by_folder[file.parent].add(int(found[1]))
        if not by_folder:
            continue
        newest = max(by_folder, key=lambda place: place.stat().st_mtime)
        ops.ranks, ops.where = tuple(sorted(by_folder[newest])), str(newest)
        for name in ("config.json", "config.yaml", "args.json", "run.json"):
            file = folder / name
            if file.is_file() and file.stat().st_size < 1 << 20 and (said := WORLD.search(file.read_text(errors="replace"))):
                ops.world = int(said[1])
