"""Training examples: plain training data with the target's own choice at every index, and batches of similar length."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftscope.eagle3.loss import Alignment, Batch, supervised_rows
from draftscope.errors import DraftscopeError
from draftscope.states.types import Sample
from draftscope.target.norms import taken_after_norm
from draftscope.target.parts import TargetParts


@dataclass(slots=True)
class Example:
    """One sequence to train on.

    Attributes:
        token_ids: [T] int64.
        states: [T, S + 1, Ht] as stored (mapped from the file): slots, then the last state before the final norm.
        answer: [T] bool.
        normed: the last state was stored after the final norm, which is then not applied again.
        best: [T] int64, argmax over the whole vocabulary of the target's distribution at each index; -1 where no row needs it.
    """

    name: str
    token_ids: Tensor
    states: Tensor
    answer: Tensor
    best: Tensor
    normed: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)


def load_examples(samples: Iterable[Sample], parts: TargetParts, *, max_length: int = 2048, cache: Path | None = None,
                  on_tokens: Callable[[int], None] | None = None, skip_bad: bool = False) -> list[Example]:
    """Samples with the target's choices computed once; tensors stay mapped where the source maps them.

    An unknown loss mask counts as all answer. Longer samples are cut to `max_length`. Samples in which nothing could be
    taught (fewer than two answer tokens) are left out.

    Args:
        cache: a file that keeps the choices between runs (made if absent).
        skip_bad: leave out samples that do not fit the target instead of raising.

    Raises:
        DraftscopeError: states of another width than the target's, or token ids outside its vocabulary.
    """
    held = _read_cache(cache)
    known = dict(held)
    examples = []
    for sample in samples:
        length = min(len(sample.token_ids), max_length)
        tokens, states = sample.token_ids[:length], sample.states[:length]
        answer = torch.ones(length, dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask[:length].bool()
        outside = bool(length) and (int(tokens.min()) < 0 or int(tokens.max()) >= len(parts.embedding))
        if skip_bad and (states.shape[2] != parts.width or outside):
            continue
        if states.shape[2] != parts.width:
            raise DraftscopeError(f"states are {states.shape[2]} wide, the target {parts.width}", where=sample.name,
                                  remedy="States and target do not belong together")
        if outside:
            raise DraftscopeError(f"a token id lies outside the target's vocabulary of {len(parts.embedding)}", where=sample.name)
        if int(answer[1:].sum()) < 2:
            continue
        normed = bool(taken_after_norm(parts, states[:, -1]))
        key = f"{sample.name}:{_fingerprint(tokens, states)}"
        if key not in known:
            known[key] = choices(parts, states[:, -1], answer, normed=normed).to(torch.int32)
            if on_tokens is not None:
                on_tokens(length)
        examples.append(Example(sample.name, tokens, states, answer, known[key].long(), normed))
    if cache is not None and len(known) != len(held):
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f".{cache.name}.part")
        save_file(known, temporary)
        os.replace(temporary, cache)
    return examples


def choices(parts: TargetParts, last: Tensor, answer: Tensor, *, normed: bool = False) -> Tensor:
    """The target's argmax over its whole vocabulary [T] int64 at each index that an answer row may be taught; -1 elsewhere.

    Args:
        normed: `last` is after the final norm.
    """
    best = torch.full((len(answer),), -1, dtype=torch.int64)
    needed = answer.clone()
    needed[:-1] |= answer[1:]
    index = needed.nonzero().squeeze(-1)
    for rows in index.split(512):
        best[rows] = parts.logits(last[rows] if normed else parts.final_norm(last[rows])).argmax(-1)
    return best


def _fingerprint(tokens: Tensor, states: Tensor) -> str:
    text = tokens.numpy().tobytes() + states[[0, len(states) // 2, -1], -1].float().numpy().tobytes()
    return f"{zlib.crc32(text):08x}"


def _read_cache(path: Path | None) -> dict[str, Tensor]:
    if path is None or not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as f:
            return {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return {}


def batch_order(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of examples of similar length, at most `tokens` each once padded, in the order of this epoch."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{epoch}".encode()))
    jitter = 1 + 0.2 * torch.rand(len(lengths), generator=draw)
    order = sorted(range(len(lengths)), key=lambda i: float(lengths[i] * jitter[i]))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]


@dataclass(slots=True)
class Collate:
    """Examples to a `Batch`.

    Attributes:
        parts: the target's, with the head's rows of the draft vocabulary only.
        draft_ids: [V] int64, draft id of each target id, -1 outside the draft vocabulary.
        column_scale: [S, Ht] by which features are divided, None = 1.
    """

    parts: TargetParts
    draft_ids: Tensor
    steps: int
    alignment: Alignment = "served"
    column_scale: Tensor | None = None

    @classmethod
    def of(cls, parts: TargetParts, target_ids: Tensor, steps: int, alignment: Alignment = "served",
           column_scale: Tensor | None = None) -> Collate:
        """From the whole target and the draft vocabulary's target ids [D]."""
        draft_ids = torch.full((parts.vocab,), -1, dtype=torch.int64)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        return cls(replace(parts, head=parts.head[target_ids].float()), draft_ids, steps, alignment, column_scale)

    def __call__(self, examples: Sequence[Example], dtype: torch.dtype = torch.float32) -> Batch:
        """Padded tensors, and the teacher's probabilities at every index that some row is taught."""
        count, length = len(examples), max(len(e) for e in examples)
        slots, width = examples[0].states.shape[1] - 1, examples[0].states.shape[2]
        token_ids = torch.zeros(count, length, dtype=torch.int64)
        features = torch.zeros(count, length, slots, width, dtype=dtype)
        supervised = torch.zeros(self.steps, count, length, dtype=torch.bool)
        teacher_row = torch.full((count, length), -1, dtype=torch.int64)
        wanted: list[Tensor] = []
        filled = 0
        for b, example in enumerate(examples):
            own = len(example)
            token_ids[b, :own] = example.token_ids
            features[b, :own] = example.states[:, :-1]
            inside = (example.best >= 0) & (self.draft_ids[example.best.clamp(min=0)] >= 0)
            rows = supervised_rows(example.answer, self.steps, self.alignment)
            needed = torch.zeros(own, dtype=torch.bool)
            for k in range(self.steps):
                taught = rows[k].clone()
                # The teacher's own first choice must be a token that the draft can say.
                taught[: max(own - 1 - k, 0)] &= inside[1 + k :]
                supervised[k, b, :own] = taught
                needed[1 + k :] |= taught[: max(own - 1 - k, 0)]
            index = needed.nonzero().squeeze(-1)
            teacher_row[b, index] = torch.arange(filled, filled + len(index))
            filled += len(index)
            last = example.states[index, -1]
            wanted.append(last.float() if example.normed else self.parts.final_norm(last))
        if self.column_scale is not None:
            features /= self.column_scale.to(dtype)
        logits = self.parts.logits(torch.cat(wanted))
        return Batch(token_ids, features, supervised, logits.softmax(-1).to(dtype), teacher_row, tuple(e.name for e in examples))


def column_rms(examples: Sequence[Example], rows: int = 20000) -> Tensor:
    """Root mean square of every column of every slot [S, Ht] over answer rows; the first token, a sink, is left out."""
    total, seen = torch.zeros(()), 0
    step = max(1, sum(len(e) for e in examples) // rows)
    for example in examples[::step] or examples:
        picked = example.answer.clone()
        picked[0] = False
        values = example.states[picked][:, :-1].float().nan_to_num(0.0, 0.0, 0.0)
        total = total + values.square().sum(0)
        seen += len(values)
    return (total / max(seen, 1)).sqrt().clamp(min=1e-6)


def split_heldout(examples: Sequence[Example], every: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples: of every `every` the last is held out."""
    held = [e for i, e in enumerate(examples) if i % every == every - 1]
    return [e for i, e in enumerate(examples) if i % every != every - 1], held
