"""Who answers prompts: our own batched loop, transformers' `generate`, or a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig

from draftscope.eagle3.generate import generate
from draftscope.eagle3.sampling import Sampling
from draftscope.engines.server import Server, answer
from draftscope.target.model import Target
from draftscope.target.wiring import Wiring


@dataclass(frozen=True, slots=True)
class Asked:
    """How answers are written. `max_new` counts the closing token; `sampling` None = greedy."""

    max_new: int = 512
    sampling: Sampling | None = None

    def seed_of(self, key: int, ids: Sequence[int]) -> int:
        """The seed of the draws of an answer: its own for every conversation and turn, whatever else is answered."""
        seed = 0 if self.sampling is None else self.sampling.seed
        return int(np.random.SeedSequence([seed, key, len(ids)]).generate_state(1)[0] >> 1)


class Answerer(Protocol):
    """Hands over (key, answer's token ids, the closing one included) in the order in which they finish."""

    def __call__(self, prompts: Iterable[tuple[int, Sequence[int]]], on_answer: Callable[[int, list[int]], None]) -> None: ...


def own_loop(target: Target, asked: Asked, *, rows: int, longest: int,
             on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """Our own decoding, in which finished rows make room at once. `longest`: tokens of prompt and answer together."""

    def run(prompts: Iterable[tuple[int, Sequence[int]]], on_answer: Callable[[int, list[int]], None]) -> None:
        keys, seeds = list[int](), list[int]()

        def noted() -> Iterator[Sequence[int]]:
            for key, ids in prompts:
                keys.append(key)
                seeds.append(asked.seed_of(key, ids))
                yield ids

        generate(target, None, noted(), wiring=Wiring(()), sampling=asked.sampling, max_new=asked.max_new,
                 stop_ids=target.stop_ids, rows=rows, context=longest, seeds=seeds, on_tokens=on_tokens,
                 on_done=lambda done: on_answer(keys[done.request], done.token_ids))

    return run


def by_transformers(target: Target, asked: Asked, *, rows: int, on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """transformers' `generate`, batch after batch, prompts padded on the left; what generation_config.json says is not asked."""
    stops = sorted(target.stop_ids)
    padding = stops[0] if stops else 0
    drawn = asked.sampling
    config = GenerationConfig(
        max_new_tokens=asked.max_new, eos_token_id=stops or None, pad_token_id=padding, do_sample=drawn is not None,
        **({} if drawn is None else {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k}),
    )

    def run(prompts: Iterable[tuple[int, Sequence[int]]], on_answer: Callable[[int, list[int]], None]) -> None:
        waiting = iter(prompts)
        while batch := list(islice(waiting, rows)):
            torch.manual_seed(asked.seed_of(*batch[0]))
            width = max(len(ids) for _, ids in batch)
            ids = torch.tensor([[padding] * (width - len(p)) + list(p) for _, p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in batch])
            with torch.inference_mode(), _said_by(target.model, config):
                out = target.model.generate(ids, attention_mask=mask, generation_config=config)
            for (key, _), row in zip(batch, out[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in target.stop_ids), len(row))
                if on_tokens is not None:
                    on_tokens(end)
                on_answer(key, row[:end])

    return run


@contextmanager
def _said_by(model: Any, config: GenerationConfig) -> Iterator[None]:
    """What a configuration leaves open `generate` takes from the model's own, such as a repetition penalty."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def by_server(server: Server, asked: Asked, encode: Callable[[str], list[int]], stop_ids: frozenset[int], *, at_once: int,
              on_tokens: Callable[[int], None] | None = None) -> Answerer:
    """A running server. Where it sends no token ids its text is encoded again, which may cut words otherwise."""
    temperature, top_p = (0.0, 1.0) if asked.sampling is None else (asked.sampling.temperature, asked.sampling.top_p)

    def run(prompts: Iterable[tuple[int, Sequence[int]]], on_answer: Callable[[int, list[int]], None]) -> None:
        waiting = iter(prompts)
        while some := list(islice(waiting, 4 * at_once)):
            told = answer(server, [ids for _, ids in some], asked.max_new, at_once=at_once, temperature=temperature, top_p=top_p,
                          seeds=[asked.seed_of(key, ids) for key, ids in some])
            for (key, _), got in zip(some, told, strict=True):
                ids = list(got.token_ids) if got.token_ids is not None else encode(got.text)
                if got.ended and stop_ids and (not ids or ids[-1] not in stop_ids):
                    # Servers leave the closing token away; the draft has to learn it.
                    ids.append(min(stop_ids) if got.stop_id is None else got.stop_id)
                if on_tokens is not None:
                    on_tokens(len(ids))
                on_answer(key, ids)

    return run
