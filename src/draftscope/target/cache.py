"""A key/value cache whose rows have lengths of their own.

Speculative decoding accepts a different number of tokens in every row of a batch, and takes rejected ones back; answers
end at different times. Both need per-row lengths and rollback, which transformers' caches do not give. Keys and values
are preallocated and written in place, so a step costs no copy of the past. Of a tree of tokens, where siblings stand for
the same position, the rows of one path can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Branches:
    """New tokens that continue the rows of a cache as trees, not as chains.

    Attributes:
        depths: [R, W] int64, how far each new token lies beyond the kept ones (0 = directly after them).
        seen: [R, W, P + W] bool, which of the P tokens written but not kept since the last `commit` or `keep`, and of the W
            new ones, each new token may look at; itself included. All see what is kept.
    """

    depths: Tensor
    seen: Tensor


class RaggedCache:
    """Keys and values of `rows` sequences of up to `capacity` tokens, each with its own length.

    It answers to the one method of `transformers.Cache` that attention layers call (`update`). Use it with a 4-D mask and
    explicit positions, both of which `begin` returns.

    Args:
        layers: number of decoder layers.
        rows: sequences held at once.
        capacity: most tokens per sequence; a longer one raises ValueError.
    """

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._selected: Tensor | None = None
        self._row_index = torch.empty(0, 1, dtype=torch.int64)
        self._write: Tensor | None = None
        self._span = 0
        self._places: Tensor | None = None  # [R, span] positions of the keys of a pass over branches
        self._depths = torch.empty(rows, 0, dtype=torch.int64)  # [R, P] depths of what such passes wrote and nobody kept yet

    def begin(self, width: int, rows: Tensor | None = None, branches: Branches | None = None) -> tuple[Tensor, Tensor]:
        """Prepare a forward pass of `width` new tokens on `rows` (all if None): a chain each, or `branches` of a tree.

        Returns:
            positions [R, width] int64 and a boolean attention mask [R, 1, width, span], true where a query may look.
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        pending = 0 if branches is None else branches.seen.shape[-1] - width
        span = int(lengths.max()) + pending + width
        if span > self.capacity:
            raise ValueError(f"sequence of {span} tokens does not fit the cache of {self.capacity}")
        write = lengths[:, None] + pending + torch.arange(width)
        keys = torch.arange(span)
        if branches is None:
            positions = write
            mask = keys[None, None, None, :] <= positions[:, None, :, None]
            self._places = None
        else:
            positions = lengths[:, None] + branches.depths
            beyond = keys - lengths[:, None]  # [R, span], which of the tokens that are not kept; negative = kept
            inside = beyond.clamp(0, pending + width - 1)
            seen = branches.seen.take_along_dim(inside[:, None, :], 2) & (beyond < pending + width)[:, None]
            mask = ((beyond < 0)[:, None] | seen)[:, None]
            known = branches.depths if not pending else torch.cat([self._depths[:, :pending], branches.depths], 1)
            self._depths = known
            self._places = torch.where(beyond < 0, keys, lengths[:, None] + known.gather(1, inside))
        self._selected, self._write, self._span = rows, write, span
        self._row_index = (torch.arange(self.rows) if rows is None else rows)[:, None]
        return positions, mask

    def distances(self, positions: Tensor) -> Tensor:
        """How far back each key of the pass lies from each query: [R, 1, width, span] int64, for attention windows."""
        keys = torch.arange(self._span) if self._places is None else self._places[:, None, None, :]
        return positions[:, None, :, None].cpu() - keys

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values [R, heads, width, dim]; return those of the whole span [R, heads, span, dim]."""
        if self._keys[layer_idx] is None:
            self._keys[layer_idx], self._values[layer_idx] = (
                new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[3]) for new in (keys, values)
            )
        held = []
        for store, new in ((self._keys[layer_idx], keys), (self._values[layer_idx], values)):
            assert store is not None and self._write is not None
            store[self._row_index.to(store.device), :, self._write.to(store.device)] = new.transpose(1, 2)
            past = store[:, :, : self._span]
            held.append(past if self._selected is None else past[self._selected.to(store.device)])
        return held[0], held[1]

    def commit(self, counts: Tensor | int, rows: Tensor | None = None) -> None:
        """Keep the first `counts` of the tokens just written; what lies beyond is forgotten (and overwritten later)."""
        if rows is None:
            self.lengths += counts
        else:
            self.lengths[rows] += counts

    def keep(self, path: Tensor, counts: Tensor, rows: Tensor | None = None) -> None:
        """Keep some of the branches just written, one path of each tree; the others are forgotten.

        Args:
            path: [R, D] int64, which of the new tokens, in order of their depth; counts: [R], how many of them count.
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        to, source = lengths[:, None] + torch.arange(path.shape[1]), lengths[:, None] + path
        if not torch.equal(to, source):
            for store in (*self._keys, *self._values):
                if store is not None:
                    at = self._row_index.to(store.device)
                    store[at, :, to.to(store.device)] = store[at, :, source.to(store.device)]
        self.commit(counts, rows)

    def clear(self, rows: Tensor) -> None:
        """Empty `rows` for new sequences."""
        self.lengths[rows] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest held sequence (part of transformers' protocol)."""
        return int(self.lengths.max())
