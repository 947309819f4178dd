"""Training-time-test attention: what a row sees at each draft step, without a cache that is rolled back.

B sequences, T rows, R chosen rows, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftscope.eagle3.config import DraftConfig


class StepMask:
    """Every row t at every step sees the step-0 keys up to t and its own later keys, in every decoder layer.

    At step 0 it is causal. At step k row t also sees the keys that row t itself produced at steps 1..k, which stand for
    the positions t+1..t+k. Rows padded on the right are never seen by real ones. Make one per batch and call it once per
    step and layer, in order. Under a window, keys further back than its width - 1 positions are hidden.

    Args:
        windows: of each layer, the last one for all that follow; none given = no windows.
        moves: the window moves on with each step, as while serving. speculators 0.9.0 trains with it where it was at step 0, and
            a row's own later keys are always in it (`models/eagle3/attention.py`).
    """

    def __init__(self, *windows: int | None, moves: bool = True) -> None:
        self.windows, self.moves = windows or (None,), moves
        self._base: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._rows: Tensor | None = None

    @classmethod
    def of(cls, config: DraftConfig, *, moves: bool = True) -> StepMask:
        """With a draft's own windows."""
        return cls(*(config.window(layer) for layer in range(config.layers)), moves=moves)

    def on(self, rows: Tensor) -> StepMask:
        """The later steps of some rows alone: rows [B, R] int64. Step 0 must have been run on all of them."""
        later = StepMask(*self.windows, moves=self.moves)
        later._base, later._rows = self._base, rows
        return later

    def narrow(self, chosen: Tensor) -> None:
        """Go on with some of those rows: indices [B, R'] into the R of `on` (or of the last `narrow`)."""
        assert self._rows is not None
        self._rows = self._rows.gather(1, chosen)
        index = chosen[:, None, :, None]
        self._own = {
            layer: [(k.take_along_dim(index, 2), v.take_along_dim(index, 2)) for k, v in own] for layer, own in self._own.items()
        }

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        window = self.windows[min(layer, len(self.windows) - 1)]
        rows = torch.arange(q.shape[2], device=q.device) if self._rows is None else self._rows
        if layer not in self._base:
            self._base[layer] = (k, v)
            if window is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
            mask = _mask(rows, 0, k.shape[2], window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)
        own = self._own.setdefault(layer, [])
        own.append((k, v))
        step = len(own)
        base_k, base_v = self._base[layer]
        grouped = q.unflatten(1, (-1, groups)) * q.shape[-1] ** -0.5
        mask = _mask(rows, step if self.moves else 0, base_k.shape[2], window)
        if mask.dim() == 3:
            mask = mask[:, None, None]
        scores = [(grouped @ base_k[:, :, None].transpose(-1, -2)).masked_fill(~mask, -torch.inf)]
        scores += [(grouped * own_k[:, :, None]).sum(-1, keepdim=True) for own_k, _ in own]
        if window is not None and self.moves:
            for j in range(step):
                if step - (j + 1) >= window:
                    scores[j + 1] = torch.full_like(scores[j + 1], -torch.inf)
        joined = torch.cat(scores, -1)
        weights = joined.to(torch.promote_types(joined.dtype, torch.float32)).softmax(-1).to(v.dtype)
        width = base_k.shape[2]
        out = weights[..., :width] @ base_v[:, :, None]
        for j, (_, own_v) in enumerate(own):
            out = out + weights[..., width + j : width + j + 1] * own_v[:, :, None]
        return out.flatten(1, 2)


def _mask(rows: Tensor, step: int, width: int, window: int | None) -> Tensor:
    distance = rows[..., None] - torch.arange(width, device=rows.device)
    mask = distance >= 0
    if window is not None:
        mask &= distance + step < window
    return mask
