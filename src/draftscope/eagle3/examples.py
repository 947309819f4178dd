"""Training examples: samples with the target's own choice at every index."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(slots=True)
class Fitting:
    """Samples as training takes them.

    Attributes:
        max_length: longer samples are cut there.
        skip_bad: leave out samples that do not fit the target instead of raising.
    """

    parts: TargetParts
    max_length: int = 2048
    skip_bad: bool = False

    def example(self, sample: Sample, *, best: Tensor | None = None, normed: bool | None = None) -> Example | None:
        """A sample with the target's choices; its tensors stay mapped where the source maps them. An unknown loss mask counts
        as all answer.

        Args:
            best, normed: the choices, and the side of the norm, where they are known already.

        Returns:
            None where nothing could be taught (fewer than two answer tokens), or where a sample that does not fit is left out.

        Raises:
            DraftscopeError: states of another width than the target's, or token ids outside its vocabulary.
        """
        parts = self.parts
        length = min(len(sample.token_ids), self.max_length)
        tokens, states = sample.token_ids[:length], sample.states[:length]
        answer = torch.ones(length, dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask[:length].bool()
        narrow = states.shape[2] != parts.width
        outside = bool(length) and (int(tokens.min()) < 0 or int(tokens.max()) >= len(parts.embedding))
        if narrow or outside:
            if self.skip_bad:
                return None
            if narrow:
                raise DraftscopeError(f"states are {states.shape[2]} wide, the target {parts.width}", where=sample.name,
                                      remedy="States and target do not belong together")
            raise DraftscopeError(f"a token id lies outside the target's vocabulary of {len(parts.embedding)}",
                                  where=sample.name, remedy="The samples come from another model's tokenizer")
        if int(answer[1:].sum()) < 2:
            return None
        if normed is None:
            normed = bool(taken_after_norm(parts, states[:, -1]))
        if best is None:
            best = choices(parts, states[:, -1], answer, normed=normed)
        return Example(sample.name, tokens, states, answer, best.long(), normed)


def load_examples(samples: Iterable[Sample], parts: TargetParts, *, max_length: int = 2048) -> list[Example]:
    """All samples that can teach something, held at once. For data larger than memory see `corpus.FileCorpus`."""
    fitting = Fitting(parts, max_length)
    return [example for sample in samples if (example := fitting.example(sample)) is not None]


def choices(parts: TargetParts, last: Tensor, answer: Tensor, *, normed: bool = False) -> Tensor:
    """The target's argmax over its whole vocabulary [T] int64 at each index that some row may be taught; -1 elsewhere. That is an
    answer token's, the one before it, and the one after it (which trainers teach that shift the mask otherwise).

    Args:
        normed: `last` is after the final norm.
    """
    best = torch.full((len(answer),), -1, dtype=torch.int64)
    needed = answer.clone()
    needed[:-1] |= answer[1:]
    needed[1:] |= answer[:-1]
    index = needed.nonzero().squeeze(-1)
    for rows in index.split(512):
        states = last[rows].to(parts.head.device)
        best[rows] = parts.logits(states if normed else parts.final_norm(states)).argmax(-1).cpu()
    return best


def fingerprint(tokens: Tensor, answer: Tensor, states: Tensor, target: str = "") -> str:
    """Short text that changes with a sample's tokens, mask and states (three rows of them), and with the target."""
    rows = states[[0, len(states) // 2, -1]].float().numpy()
    return f"{zlib.crc32(tokens.numpy().tobytes() + answer.numpy().tobytes() + rows.tobytes() + target.encode()):08x}"
