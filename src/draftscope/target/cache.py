"""A key/value cache whose rows have lengths of their own.

Speculative decoding accepts a different number of tokens in every row of a batch, and takes rejected ones back; answers
end at different times. Both need per-row lengths and rollback, which transformers' caches do not give. Keys and values
are preallocated and written in place, so a step costs no copy of the past.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

    def begin(self, width: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Prepare a forward pass of `width` new tokens on `rows` (all if None).

        Returns:
            positions [R, width] int64 and a boolean attention mask [R, 1, width, span], true where a query may look.
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        span = int(lengths.max()) + width
        if span > self.capacity:
            raise ValueError(f"sequence of {span} tokens does not fit the cache of {self.capacity}")
        positions = lengths[:, None] + torch.arange(width)
        mask = torch.arange(span)[None, None, None, :] <= positions[:, None, :, None]
        self._selected, self._write, self._span = rows, positions, span
        self._row_index = (torch.arange(self.rows) if rows is None else rows)[:, None]
        return positions, mask

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

    def clear(self, rows: Tensor) -> None:
        """Empty `rows` for new sequences."""
        self.lengths[rows] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest held sequence (part of transformers' protocol)."""
        return int(self.lengths.max())
