"""A few sequences kept by name: those whose names have the smallest hashes, so the same ones whatever the order or sharding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import State

KEEP = 32
LONGEST = 4096
"""Rows kept of a sequence, from its beginning."""


@dataclass(slots=True)
class Kept:
    """A sequence: token_ids [t] int64 (empty: not known), answer [t] uint8 (1 answer, 0 not, 2 unknown), norms [L, t] float32."""

    name: str
    rows: int
    token_ids: Tensor
    answer: Tensor
    norms: Tensor


def key_of(name: str) -> int:
    """64 bits of a hash of the name."""
    hashed = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, person=b"kept")
    return int.from_bytes(hashed.digest(), "big") >> 1


class KeptSequences:
    """At most `KEEP` sequences with the smallest keys."""

    def __init__(self) -> None:
        self.held: dict[int, Kept] = {}

    def offer(self, name: str, token_ids: Tensor | None, answer: np.ndarray | None, norms: np.ndarray) -> None:
        """Take in a sequence if its key is among the smallest: norms [L, T], token_ids and answer [T]."""
        key = key_of(name)
        if key in self.held or (len(self.held) >= KEEP and key > max(self.held)):
            return
        count = norms.shape[1]
        ids = torch.zeros(0, dtype=torch.int64) if token_ids is None else token_ids[:LONGEST].to(torch.int64).clone()
        known = np.full(count, 2, np.uint8) if answer is None else answer.astype(np.uint8)
        self.held[key] = Kept(name, count, ids, torch.from_numpy(known[:LONGEST].copy()),
                              torch.from_numpy(norms[:, :LONGEST].astype(np.float32)))
        self._cut()

    def merge(self, other: KeptSequences) -> None:
        self.held |= {key: kept for key, kept in other.held.items() if key not in self.held}
        self._cut()

    def _cut(self) -> None:
        self.held = {key: self.held[key] for key in sorted(self.held)[:KEEP]}

    def state(self) -> State:
        """Sequences behind each other: `names` UTF-8 with a zero byte after each."""
        held = list(self.held.items())
        names = b"".join(kept.name.encode("utf-8", "surrogateescape") + b"\0" for _, kept in held)
        none = torch.zeros(0)
        return {
            "keys": torch.tensor([key for key, _ in held], dtype=torch.int64),
            "names": torch.from_numpy(np.frombuffer(names, np.uint8).copy()),
            "rows": torch.tensor([[kept.rows, len(kept.token_ids), len(kept.answer)] for _, kept in held],
                                 dtype=torch.int64).view(-1, 3),
            "token_ids": torch.cat([none.long(), *(kept.token_ids for _, kept in held)]),
            "answer": torch.cat([none.to(torch.uint8), *(kept.answer for _, kept in held)]),
            "norms": torch.cat([kept.norms for _, kept in held], 1) if held else none.view(0, 0),
        }

    @classmethod
    def from_state(cls, state: State) -> KeptSequences:
        """Raises ValueError where the parts do not fit each other."""
        made = cls()
        names = state["names"].numpy().tobytes().split(b"\0")[:-1]
        ids = answers = 0
        for key, name, (rows, own_ids, own) in zip(state["keys"].tolist(), names, state["rows"].tolist(), strict=True):
            made.held[key] = Kept(
                name.decode("utf-8", "surrogateescape"), rows, state["token_ids"][ids : ids + own_ids].clone(),
                state["answer"][answers : answers + own].clone(), state["norms"][:, answers : answers + own].clone(),
            )
            ids, answers = ids + own_ids, answers + own
        if (ids, answers) != (len(state["token_ids"]), len(state["answer"])) or state["norms"].shape[-1] != answers:
            raise ValueError("sequences that were kept do not fit their lengths")
        return made

    def result(self) -> list[Kept]:
        return list(self.held.values())
