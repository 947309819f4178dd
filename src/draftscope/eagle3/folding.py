"""A repair of the states folded into the draft's `fc`, so that it serves right over states that stay wrong.

`fc` is linear, so what it makes of repaired slots R x is what another matrix makes of the slots x as they come: its columns moved
for an order, multiplied for a factor, and by the transposed map for a rotation. Norms before `fc` let some of these through
exactly, and some not at all. Where no matrix does it exactly, one is fitted that comes near.

Shapes: S slots, Ht target width, H draft width, N rows. Rows are row vectors: a map takes row x to x @ map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftscope.eagle3.model import Draft

STRENGTHS = tuple(10.0**e for e in range(-6, 2))
"""Ridge strengths tried, as multiples of the mean square of a singular value."""
ORTHOGONAL = 1e-3


@dataclass(frozen=True, slots=True)
class Linear:
    """A repair that is linear in a row: recorded slot j times its factor, then through its map; then put in order.

    Attributes:
        order: slot i takes recorded slot order[i]; () = as recorded. A slot may be taken twice.
        scale: recorded slot -> factor.
        maps: recorded slot -> [Ht, Ht].
    """

    order: tuple[int, ...] = ()
    scale: Mapping[int, float] = field(default_factory=dict)
    maps: Mapping[int, Tensor] = field(default_factory=dict)

    def apply(self, features: Tensor) -> Tensor:
        """Recorded slots [..., S, Ht] repaired, float32."""
        slots = list(features.float().unbind(-2))
        for slot, factor in self.scale.items():
            slots[slot] = slots[slot] * factor
        for slot, turn in self.maps.items():
            slots[slot] = slots[slot] @ turn.float()
        return torch.stack([slots[i] for i in self.order or range(len(slots))], -2)


@dataclass(frozen=True, slots=True)
class Folded:
    """Tensors that take the place of the draft's, float32, by native name.

    Attributes:
        why_not: why this is not exactly the repair; empty where it is.
    """

    tensors: dict[str, Tensor]
    why_not: str = ""


def fold(draft: Draft, repair: Linear) -> Folded:
    """`fc`, and the norms before it, for states that come unrepaired: its output is the draft's over repaired ones.

    With a norm per slot (`fc_norm`) or over all slots (`norm_before_fc`) a common factor is taken out anyway, so that nothing is
    to be folded, and an orthogonal map passes the norm if its weight moves into `fc`. One slot's factor before a norm over all
    slots, and any other map before a norm, have no exact fold: what is returned is then the nearest that can be written.

    Raises:
        ValueError: the draft has no `fc`.
    """
    config = draft.config
    if not config.use_aux_hidden_state:
        raise ValueError("this draft has no fc")
    slots, width = config.slots, config.target_hidden_size
    order = repair.order or tuple(range(slots))
    weight = draft.fc.weight.float().unflatten(1, (slots, width))
    over_all = draft.input_norm.weight.float().unflatten(0, (slots, width)) if config.norm_before_fc else None
    per_slot = None
    if config.fc_norm:
        per_slot = torch.stack([draft.get_parameter(f"fc_norm.{j}.weight").float() for j in range(slots)])
    factors = torch.tensor([repair.scale.get(j, 1.0) for j in range(slots)])
    whole = sorted(order) == list(range(slots))
    turned = any(not _orthogonal(turn) for turn in repair.maps.values())
    why_not = ""
    if over_all is not None or per_slot is not None:
        if turned:
            why_not = "a norm stands before fc, and the map changes lengths"
        elif repair.maps and over_all is not None and per_slot is not None:
            why_not = "two norms stand before fc, and the first one's weight acts in the turned basis"
        elif not whole and over_all is not None:
            why_not = "a norm over all slots stands before fc, and a slot that is taken twice or left out changes its length"
        elif per_slot is None and len(set(factors.abs().tolist())) > 1:
            why_not = "a norm over all slots stands before fc, and one slot's factor changes its length from row to row"
        # What the norm takes out must not be put back.
        factors = factors.sign() if per_slot is not None else factors / factors.abs().mean()
    made = torch.zeros_like(weight)
    norms = {name: held for name, held in (("input_norm", over_all), ("fc_norm", per_slot)) if held is not None}
    moved = {name: held.clone() for name, held in norms.items()}
    for i, j in enumerate(order):
        block = weight[:, i] * factors[j]
        if j in repair.maps or order.count(j) > 1:
            for name, held in norms.items():
                block = block * held[i]
                moved[name][j] = 1
        else:
            for name, held in norms.items():
                moved[name][j] = held[i]
        made[:, j] += block @ repair.maps[j].float().T if j in repair.maps else block
    tensors = {"fc.weight": made.flatten(1)}
    for name, held in moved.items():
        if torch.equal(held, norms[name]):
            continue
        tensors |= {"input_norm.weight": held.flatten()} if name == "input_norm" else {
            f"fc_norm.{j}.weight": held[j] for j in range(slots)}
    return Folded(tensors, why_not)


def _orthogonal(turn: Tensor) -> bool:
    product = turn.double() @ turn.double().T
    return bool((product - torch.eye(len(turn), dtype=torch.float64)).abs().max() < ORTHOGONAL)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A matrix fitted in place of `fc`'s.

    Attributes:
        weight: [H, S x Ht] float32.
        strength: of the ridge, as a multiple of the mean squared singular value.
        error: mean relative error of the output on sequences left out of the fit, weighted as the fit is; before: with the start.
        rows: rows fitted.
    """

    weight: Tensor
    strength: float
    error: float
    before: float
    rows: int


def fit(start: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Fitted:
    """The matrix W that takes rows x to outputs y: least squares of |W x - y| / |y|, drawn towards `start` (ridge).

    Its strength is the one that does best on half of the sequences when fitted on the others. Rows may be fewer than columns.

    Args:
        start: [H, D], what is left unsaid by the rows stays so.
        inputs, outputs: by sequence, [N, D] and [N, H]; two sequences or more. Rows that are not finite, or whose output is zero,
            are left out.

    Raises:
        ValueError: fewer than two sequences with a usable row.
    """
    pairs = [_usable(x.double(), y.double(), start.double()) for x, y in zip(inputs, outputs, strict=True)]
    pairs = [(x, y) for x, y in pairs if len(x)]
    if len(pairs) < 2:
        raise ValueError("a fit needs rows of two sequences or more")
    halves = [tuple(torch.cat([pair[side] for pair in pairs[half::2]]) for side in (0, 1)) for half in (0, 1)]
    missed = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    for here, there in (halves, halves[::-1]):
        for i, change in enumerate(_ridges(*here)):
            missed[i] += (there[0] @ change - there[1]).square().sum()
    count = sum(len(x) for x, _ in halves)
    best = int(missed.argmin())
    x, y = (torch.cat(part) for part in zip(*halves, strict=True))
    change = _ridges(x, y)[best]
    return Fitted(
        (start.double() + change.T).float(), STRENGTHS[best], float((missed[best] / count).sqrt()),
        float((y.square().sum() / count).sqrt()), count,
    )


def _usable(x: Tensor, y: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by the size of their output, and what `start` leaves of it."""
    size = y.norm(dim=-1)
    kept = x.isfinite().all(-1) & size.isfinite() & (size > 0)
    x, y, size = x[kept], y[kept], size[kept, None]
    return x / size, (y - x @ start.T) / size


def _ridges(x: Tensor, y: Tensor) -> list[Tensor]:
    """[D, H] by strength: argmin |x B - y|^2 + s |B|^2."""
    left, size, right = torch.linalg.svd(x, full_matrices=False)
    projected, unit = left.T @ y, size.square().mean()
    return [right.T @ ((size / (size.square() + s * unit).clamp_min(1e-300))[:, None] * projected) for s in STRENGTHS]
