"""Prompts to the target's own answers: batched decoding in which finished rows make room for the next prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftscope.target.cache import RaggedCache


@dataclass(slots=True)
class Request:
    """One prompt to answer.

    Attributes:
        key: the caller's own id, handed back with the answer.
        prompt_ids: rendered prompt.
        temperature: 0 for greedy.
        stop_ids: tokens that end the answer (kept as its last token).
        max_new: most tokens to write.
    """

    key: int
    prompt_ids: list[int]
    temperature: float
    stop_ids: frozenset[int]
    max_new: int
    answer_ids: list[int] = field(default_factory=list)


def answers(model: Any, requests: Iterable[Request], *, rows: int = 96, capacity: int = 512, top_p: float = 0.95,
            seed: int = 0, on_step: Callable[[int], None] | None = None) -> Iterator[Request]:
    """Answer requests, `rows` at a time, in the order in which they finish.

    An answer ends at a stop token, at `max_new`, or where the capacity is reached. Sampled rows draw from the nucleus
    `top_p` at their temperature; greedy rows take the argmax.

    Args:
        model: a transformers causal language model with `.model` and `.lm_head`.
        on_step: called with the number of tokens written by each step.
    """
    draw = torch.Generator().manual_seed(seed)
    pending = iter(requests)
    cache = RaggedCache(model.config.num_hidden_layers, rows, capacity)
    active: list[Request | None] = [None] * rows
    next_ids = torch.zeros(rows, dtype=torch.int64)

    def forward(ids: Tensor, selected: Tensor | None, counts: Tensor | int) -> Tensor:
        positions, mask = cache.begin(ids.shape[1], selected)
        hidden = model.model(ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True).last_hidden_state
        cache.commit(counts, selected)
        return hidden

    exhausted = False
    with torch.inference_mode():
        while True:
            free = [row for row, request in enumerate(active) if request is None]
            fresh: list[int] = []
            while free and not exhausted:
                request = next(pending, None)
                if request is None:
                    exhausted = True
                elif len(request.prompt_ids) + 1 < capacity:
                    row = free.pop(0)
                    active[row] = request
                    fresh.append(row)
            # Prompts of unlike lengths are padded on the right; a row's own length hides the padding.
            for chunk in (fresh[i : i + 8] for i in range(0, len(fresh), 8)):
                selected = torch.tensor(chunk)
                cache.clear(selected)
                prompts = [torch.tensor(active[row].prompt_ids) for row in chunk]  # type: ignore[union-attr]
                ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
                counts = torch.tensor([len(p) for p in prompts])
                hidden = forward(ids, selected, counts)
                last = hidden[torch.arange(len(chunk)), counts - 1]
                temperatures = torch.tensor([active[row].temperature for row in chunk])  # type: ignore[union-attr]
                next_ids[selected] = pick(model.lm_head(last), temperatures, top_p, draw)
            live = 0
            for row, request in enumerate(active):
                if request is None:
                    continue
                token = int(next_ids[row])
                request.answer_ids.append(token)
                full = int(cache.lengths[row]) + 1 >= capacity
                if token in request.stop_ids or len(request.answer_ids) >= request.max_new or full:
                    active[row] = None
                    cache.clear(torch.tensor([row]))
                    yield request
                else:
                    live += 1
            if on_step is not None:
                on_step(live)
            if live == 0:
                if exhausted:
                    return
                continue
            counts = torch.tensor([0 if request is None else 1 for request in active])
            hidden = forward(next_ids[:, None], None, counts)
            temperatures = torch.tensor([0.0 if request is None else request.temperature for request in active])
            next_ids = pick(model.lm_head(hidden[:, -1]), temperatures, top_p, draw)


def pick(logits: Tensor, temperatures: Tensor, top_p: float, draw: torch.Generator) -> Tensor:
    """Next tokens [R] from logits [R, V]: argmax where the temperature is 0, else a draw from the nucleus."""
    chosen = logits.argmax(-1)
    sampled = (temperatures > 0).nonzero().squeeze(-1)
    if len(sampled):
        # 200 candidates hold the nucleus of any distribution worth sampling from; sorting 50k logits a row does not pay.
        values, ids = (logits[sampled].float() / temperatures[sampled, None]).topk(min(200, logits.shape[-1]), dim=-1)
        probabilities = values.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities > top_p] = 0
        choice = torch.multinomial(probabilities, 1, generator=draw)
        chosen[sampled] = ids.gather(1, choice).squeeze(1)
    return chosen
