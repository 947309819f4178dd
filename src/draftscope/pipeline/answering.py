"""Who answers prompts: our own batched loop, transformers' `generate`, or a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch

from draftscope.engines.server import Server, answer
from draftscope.pipeline.answers import Request, answers
from draftscope.target.model import Target


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are written. `max_new` counts the closing token; `temperature` 0 = greedy."""

    max_new: int = 512
    temperature: float = 0.0
    top_p: float = 0.95
    seed: int = 0


class Answerer(Protocol):
    """Yields (key, answer's token ids, the closing one included) in the order in which they finish."""

    def __call__(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, list[int]]]: ...


def own_loop(target: Target, sampling: Sampling, *, rows: int, longest: int,
             on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """Our own loop, in which finished rows make room at once. `longest`: tokens of prompt and answer together."""

    def run(prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, list[int]]]:
        requests = (Request(key, list(ids), sampling.temperature, target.stop_ids, sampling.max_new) for key, ids in prompts)
        for done in answers(target.model, requests, rows=rows, capacity=longest, top_p=sampling.top_p, seed=sampling.seed,
                            on_step=on_tokens):
            yield done.key, done.answer_ids

    return run


def by_transformers(target: Target, sampling: Sampling, *, rows: int,
                    on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """transformers' `generate`, batch after batch, prompts padded on the left."""
    stops = sorted(target.stop_ids)
    options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p} if sampling.temperature else {
        "do_sample": False, "temperature": None, "top_p": None, "top_k": None}

    def run(prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, list[int]]]:
        torch.manual_seed(sampling.seed)
        waiting = iter(prompts)
        while batch := list(islice(waiting, rows)):
            width = max(len(ids) for _, ids in batch)
            padding = stops[0] if stops else 0
            ids = torch.tensor([[padding] * (width - len(p)) + list(p) for _, p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in batch])
            with torch.inference_mode():
                out = target.model.generate(ids, attention_mask=mask, max_new_tokens=sampling.max_new, eos_token_id=stops or None,
                                            pad_token_id=padding, **options)
            for (key, _), row in zip(batch, out[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in target.stop_ids), len(row))
                if on_tokens is not None:
                    on_tokens(end)
                yield key, row[:end]

    return run


def by_server(server: Server, sampling: Sampling, encode: Callable[[str], list[int]], stop_ids: frozenset[int], *, at_once: int,
              on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """A running server. Where it sends no token ids its text is encoded again, which may cut words otherwise."""

    def run(prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, list[int]]]:
        waiting = iter(prompts)
        while some := list(islice(waiting, 4 * at_once)):
            told = answer(server, [ids for _, ids in some], sampling.max_new, at_once=at_once, temperature=sampling.temperature,
                          top_p=sampling.top_p)
            for (key, _), got in zip(some, told, strict=True):
                ids = list(got.token_ids) if got.token_ids is not None else encode(got.text)
                if got.ended and stop_ids and (not ids or ids[-1] not in stop_ids):
                    # Servers leave the closing token away; the draft has to learn it.
                    ids.append(min(stop_ids) if got.stop_id is None else got.stop_id)
                if on_tokens is not None:
                    on_tokens(len(ids))
                yield key, ids

    return run
