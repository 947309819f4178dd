"""A request served token by token, with growing caches, in float64: what replay is held against."""

from __future__ import annotations

import numpy as np
import torch
from support import random_draft
from torch import Tensor

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft
from draftscope.states.types import Sequence, Steps

WIDTH, VOCAB, K = 16, 7, 3


class Growing:
    """Attention with a cache for each layer that grows by one token a call."""

    def __init__(self, config: DraftConfig) -> None:
        self.windows = [config.window(layer) for layer in range(config.layers)]
        self.k, self.v = [[] for _ in self.windows], [[] for _ in self.windows]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        self.k[layer].append(k)
        self.v[layer].append(v)
        window = self.windows[layer]
        seen = slice(None) if window is None else slice(-window, None)
        keys, values = (torch.cat(x[layer][seen], 2).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (self.k, self.v))
        weights = (q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return weights @ values

    def cut(self, length: int) -> None:
        for held in (*self.k, *self.v):
            del held[length:]


class Server:
    """The draft as an engine runs it: accepted rows prefilled into a cache, drafted ones taken back after each step."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.cache, self.rows = draft, Growing(draft.config), 0

    @torch.no_grad()
    def propose(self, features: Tensor, tokens: Tensor, t: int, k: int) -> list[int]:
        """Draft k tokens from row t (ascending from call to call), feeding back the draft's own states and tokens."""
        draft = self.draft
        for row in range(self.rows, t + 1):
            position = torch.tensor([[row]])
            out = draft(draft.project(features[row])[None, None], draft.embed(tokens[row + 1])[None, None], position, self.cache)
        self.rows, self.logits, self.states, found = t + 1, draft.logits(out)[0, 0], [], []
        for step in range(k):
            found.append(int(draft.target_ids[draft.logits(out).argmax()]))
            self.states.append(out[0, 0])
            if step + 1 < k:
                token, position = torch.tensor([[found[-1]]]), torch.tensor([[t + step + 1]])
                out = draft(draft.feedback(out), draft.embed(token), position, self.cache)
        self.cache.cut(self.rows)
        return found


def propose(draft: Draft, features: Tensor, tokens: Tensor, t: int, k: int) -> list[int]:
    return Server(draft).propose(features, tokens, t, k)


def small_draft(seed: int = 1, draft_vocab: int | None = None, **switches: object) -> Draft:
    draft = random_draft(seed, width=WIDTH, vocab=VOCAB, draft_vocab=draft_vocab, **switches).double()
    draft.embedding = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    if draft_vocab is not None:
        draft.target_ids = torch.tensor(sorted(np.random.default_rng(0).permutation(VOCAB)[:draft_vocab].tolist()))
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return draft


def served(draft: Draft, seed: int, k: int = K, *, prompt: int = 4, rounds: int = 8, server: Server | None = None) -> Sequence:
    """A request whose target is played by a die, with every stage of the draft recorded."""
    rng = np.random.default_rng(seed)
    config = draft.config
    features = torch.from_numpy(rng.standard_normal((prompt + 1 + rounds * (k + 1), config.slots, config.target_hidden_size)))
    tokens = rng.integers(0, config.vocab_size, prompt + 1).tolist()
    starts, counts, drafts, states, server = [], [], [], [], server or Server(draft)
    for _ in range(rounds):
        start = len(tokens) - 2
        drafted = server.propose(features, torch.tensor(tokens), start, k)
        accepted = int(rng.integers(0, k + 1))
        bonus = int(rng.integers(0, config.vocab_size))
        if accepted < k and bonus == drafted[accepted]:
            bonus = (bonus + 1) % config.vocab_size
        tokens += [*drafted[:accepted], bonus]
        starts.append(start)
        counts.append(accepted)
        drafts.append(drafted)
        states.append(torch.stack(server.states))
    features = features[: len(tokens) - 1]
    with torch.no_grad():
        projected = draft.project(features)
    return Sequence(
        name=f"r{seed}", token_ids=torch.tensor(tokens), features=features, last=None,
        answer=torch.arange(len(tokens)) > starts[0], positions=torch.arange(len(features)),
        steps=Steps(torch.tensor(starts), torch.tensor(drafts), torch.tensor(counts), torch.stack(states)), fc_output=projected,
    )
