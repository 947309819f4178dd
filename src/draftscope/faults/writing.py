"""How texts come to be: what a data writer, a chat template and a mask builder make of conversations, rightly or wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from draftscope.eagle3.generate import generate
from draftscope.eagle3.sampling import Sampling
from draftscope.pipeline.turns import CLOSING, OTHER, Markers, kinds, of_template
from draftscope.target.model import Target
from draftscope.target.packed import pack, plain_copy
from draftscope.target.wiring import Wiring

Rendering = Literal[
    "", "system turn", "other system turn", "other template", "doubled first token", "no generation prompt", "thinking block",
    "bare"]
LossMask = Literal[
    "kept", "empty", "empty in part", "cut", "unmarked", "early", "late", "whole", "users", "open", "markers", "other's",
    "every turn"]
Author = Literal["target", "other model", "stale target", "sampled hot", "other hand"]
SYSTEM, OTHER_SYSTEM = "You are a helpful assistant.", "Answer like a pirate, in rhymes only."
OTHER_MODEL, STALE = 0.4, 0.3
"""Weights off by this share of their spread: another model, and the same before it was tuned further."""
THINKING = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of both sides.

    Attributes:
        train, serve: how training conversations, and served prompts, are rendered otherwise than the target's template does.
        author: who wrote the training answers. off: the other model's weights are off by this share of their spread; None =
            as OTHER_MODEL and STALE say.
        packed: training conversations put two into a sample, and run as one text.
        domain: what is served is of the prompts' kind, or of one that the training data does not hold.
    """

    train: Rendering = ""
    serve: Rendering = ""
    author: Author = "target"
    packed: bool = False
    domain: Literal["", "other"] = ""
    off: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """One text: token ids [T] and which of them are answer tokens [T]."""

    token_ids: list[int]
    answer: list[bool]


class Writer:
    """Renders, masks and packs for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def markers(self) -> Markers:
        """Of the target's template; ValueError where it has none that can be told."""
        found = of_template(self.target.tokenizer)
        if found is None:
            raise ValueError(f"{self.target.folder}: its chat template's markers cannot be told")
        return found

    def ids(self, text: str) -> list[int]:
        return list(self.target.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, prompt: list[int], rendering: Rendering) -> list[int]:
        """A prompt as the target's template renders it, rendered otherwise."""
        if not rendering:
            return prompt
        marks = self.markers()
        opening, header = list(marks.opening), list(marks.others[0])
        if rendering == "doubled first token":
            return [prompt[0], *prompt]
        if rendering == "no generation prompt":
            return prompt[: -len(opening)] if prompt[-len(opening) :] == opening else prompt
        if rendering == "thinking block":
            return prompt + self.ids(THINKING)
        if rendering in ("system turn", "other system turn"):
            content = SYSTEM if rendering == "system turn" else OTHER_SYSTEM
            header = list(next(once for once in marks.once[::-1]))
            return [*header, *self.ids(content), *sorted(marks.closing)[:1], *marks.separators, *prompt]
        kind = kinds(np.array(prompt), marks, [])
        content_ids = [token for token, k in zip(prompt, kind, strict=True) if k == OTHER]
        if rendering == "bare":
            return content_ids
        return [*self.ids("### Human: "), *content_ids, *self.ids("\n### Assistant: ")]

    def conversations(self, prompts: Sequence[list[int]], answers: Sequence[list[int]], texts: Texts, *, max_new: int = 64,
                      stop_ids: frozenset[int] = frozenset(), turns: bool = False) -> list[Written]:
        """Training texts of prompts and the target's own answers to them.

        Args:
            turns: each prompt comes after another prompt and its answer, by another hand; the target answers the second.
        """
        rendered = [self.prompt(prompt, texts.train) for prompt in prompts]
        if turns:
            return self._two_turns(rendered, answers, max_new, stop_ids)
        answers = self._answers(rendered, answers, texts.author, max_new, stop_ids, texts.train, texts.off)
        found = [Written(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(rendered, answers, strict=True)]
        if texts.packed:
            return [Written(a.token_ids + b.token_ids, a.answer + b.answer)
                    for a, b in zip(found[::2], found[1::2], strict=False)]
        return found

    def _answers(self, prompts: list[list[int]], own: Sequence[list[int]], author: Author, max_new: int,
                 stop_ids: frozenset[int], rendering: Rendering = "", off: float | None = None) -> Sequence[list[int]]:
        if author == "target" and not rendering:
            return own
        if author == "other hand":
            marks = self.markers()
            asked_by = [[t for t, k in zip(p, kinds(np.array(p), marks, []), strict=True) if k == OTHER] for p in prompts]
            end = sorted(marks.closing)[:1]
            return [[*asked_by[i - 1], *asked_by[i - 2], *asked_by[i - 3], *end] for i in range(len(prompts))]
        if author == "sampled hot":
            drawn = generate(self.target, None, prompts, wiring=Wiring(()), sampling=Sampling(1.3, seed=1), max_new=max_new,
                             stop_ids=stop_ids, rows=len(prompts))
            return [answer.token_ids for answer in drawn]
        usual = OTHER_MODEL if author == "other model" else STALE
        writer = self.target if author == "target" else disturbed(self.target, usual if off is None else off)
        made = generate(writer, None, prompts, wiring=Wiring.of((self.target.layers,)), max_new=max_new, stop_ids=stop_ids,
                        rows=16)
        return [answer.token_ids for answer in made]

    def _two_turns(self, prompts: list[list[int]], answers: Sequence[list[int]], max_new: int,
                   stop_ids: frozenset[int]) -> list[Written]:
        marks = self.markers()
        by_hand = self._answers(prompts, answers, "other hand", max_new, stop_ids)
        before = []
        for i, prompt in enumerate(prompts):
            closing = sorted(marks.closing)[:1]
            content = [token for token in by_hand[i] if token not in marks.closing]
            before.append((prompt, [*content, *closing], [*marks.separators, *prompts[(i + 1) % len(prompts)]]))
        asked = [p + a + q for p, a, q in before]
        made = generate(self.target, None, asked, wiring=Wiring.of((self.target.layers,)), max_new=max_new, stop_ids=stop_ids,
                        rows=16)
        return [
            Written(p + a + q + last.token_ids,
                    [False] * len(p) + [True] * len(a) + [False] * len(q) + [True] * len(last.token_ids))
            for (p, a, q), last in zip(before, made, strict=True)]

    def masked(self, written: list[Written], how: LossMask, part: int = 3, by: int = 1) -> list[Written]:
        """The texts with their masks as a wrong builder makes them; `cut` cuts the texts themselves.

        Args:
            part, by: as `Plant` has them.
        """
        if how in ("kept", "every turn"):
            return written
        if how == "cut":
            starts = sorted(one.answer.index(True) for one in written)
            length = starts[len(starts) // 2]
            return [Written(one.token_ids[:length], one.answer[:length]) for one in written]
        if how == "other's":
            return [Written(one.token_ids, _fitted(written[(i + 1) % len(written)].answer, len(one.answer)))
                    for i, one in enumerate(written)]
        return [replace(one, answer=self._mask(one, how, i, part, by)) for i, one in enumerate(written)]

    def _mask(self, one: Written, how: LossMask, number: int, part: int, by: int) -> list[bool]:
        mask, none = one.answer, [False] * len(one.answer)
        if how in ("empty", "unmarked"):
            return none
        if how == "empty in part":
            return mask if number % part else none
        if how == "whole":
            return [True] * len(mask)
        if how == "early":
            return [*mask[by:], *none[:by]]
        if how == "late":
            return [*none[:by], *mask[:-by]]
        marks = self.markers()
        kind = kinds(np.array(one.token_ids), marks)
        if how == "users":
            return [on or k == OTHER for on, k in zip(mask, kind, strict=True)]
        if how == "open":
            return [on and k != CLOSING for on, k in zip(mask, kind, strict=True)]
        before = len(marks.opening)
        return [on or any(mask[t + 1 : t + 1 + before]) for t, on in enumerate(mask)]


def disturbed(target: Target, amount: float) -> Target:
    """The target with every matrix of its layers off by this share of its own spread: another model of the same tokenizer."""
    model, packed = plain_copy(target)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and ".layers." in name:
                weight += amount * weight.std() * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
    made = Target(model, target.folder)
    if packed:
        pack(made)
    return made


def elsewhere(prompts: Sequence[list[int]], marks: Markers, vocab: int) -> list[list[int]]:
    """Prompts of the same frame whose contents are drawn evenly from the vocabulary: of no domain that was trained on."""
    draw = np.random.default_rng(3)
    found = []
    for prompt in prompts:
        ids = np.array(prompt)
        content = kinds(ids, marks, []) == OTHER
        used = [t for t in range(vocab) if t not in marks.closing and t not in marks.opening]
        ids[content] = draw.choice(used, int(content.sum()))
        found.append(ids.tolist())
    return found


def _fitted(mask: list[bool], length: int) -> list[bool]:
    return mask[:length] + [False] * (length - len(mask))
