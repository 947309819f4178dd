"""What can happen to a row of states between target and draft, each as a measurement on vectors.

Vectors are rows; `x` is what was found, `r` what it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30


def decompose(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """x = (1 + offset) r + rest, with the rest perpendicular to r.

    Both come from the difference x - r, so that they stay exact where x and r nearly agree. The relative error of x is
    hypot(offset, rest), and after a constant factor s it is hypot(1 + offset - s, rest) / |s|.

    Args:
        x, r: [..., H] float32 or float64, broadcast against each other.

    Returns:
        offset [...] and |rest| / |r| [...]. Where r is zero: offset 0 and rest 0 (x zero too) or infinity.
    """
    square = r.square().sum(-1)
    difference = x - r
    offset = (difference * r).sum(-1) / square.clamp_min(TINY)
    rest = (difference - offset[..., None] * r).norm(dim=-1)
    empty = square <= TINY
    if bool(empty.any()):
        rest = torch.where(empty, torch.where(rest > 0, torch.inf, 0.0).to(rest.dtype), rest / square.sqrt().clamp_min(TINY))
        return offset.masked_fill(empty.expand_as(offset), 0.0), rest
    return offset, rest / square.sqrt()


def cosines(x: Tensor) -> Tensor:
    """Cosines between all rows of x [M, H], float64 [M, M]."""
    unit = x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(TINY)
    return unit @ unit.T


def gram_error(x: Tensor, r: Tensor) -> float:
    """How far the cosines between rows of x are from those of r, in units of their spread: 0 under any orthogonal map.

    Unrelated rows give 1 or more. It needs no map to be fitted, hence also works with fewer rows than dimensions.
    """
    count = len(x)
    if count < 3:
        return float("inf")
    upper = torch.triu_indices(count, count, 1)
    found, expected = cosines(x)[upper[0], upper[1]], cosines(r)[upper[0], upper[1]]
    return float((found - expected).square().mean().sqrt() / expected.std().clamp_min(1e-12))


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal map between two sets of rows.

    Attributes:
        gram_error: disagreement of the cosines between rows (see `gram_error`).
        error: median relative error on the half of the rows that the map was not fitted on.
        determined: whether the fit had at least as many rows as dimensions; if not, `error` is an upper bound.
        permutation: whether it only re-orders channels (and perhaps flips signs).
        rows: rows used, both halves.
    """

    gram_error: float
    error: float
    determined: bool
    permutation: bool
    rows: int


def fit_rotation(x: Tensor, r: Tensor) -> Rotation:
    """Orthogonal Procrustes: fitted on every other row, judged on the rest.

    With fewer rows than dimensions the map is known on their span alone; what lies outside counts as error.

    Args:
        x, r: [M, H].
    """
    x, r = x.double(), r.double()
    fit_x, fit_r, held_x, held_r = x[::2], r[::2], x[1::2], r[1::2]
    predicted = held_r @ fit_orthogonal(fit_x, fit_r)
    error = (held_x - predicted).norm(dim=-1) / held_r.norm(dim=-1).clamp_min(TINY)
    return Rotation(
        gram_error=gram_error(x, r), error=float(error.median()) if len(error) else float("inf"),
        determined=len(fit_r) >= x.shape[1], permutation=permuted(x, r), rows=len(x),
    )


def fit_orthogonal(x: Tensor, r: Tensor) -> Tensor:
    """The orthogonal map [H, H] on the rows' span for which r @ map is nearest to x [M, H] (Procrustes)."""
    basis_r, tri_r = torch.linalg.qr(r.T)
    basis_x, tri_x = torch.linalg.qr(x.T)
    left, _, right = torch.linalg.svd(tri_r @ tri_x.T)
    return basis_r @ left @ right @ basis_x.T


def permuted(x: Tensor, r: Tensor) -> bool:
    """Whether nearly every channel of r is found as one channel of x (of its own), up to sign."""
    if len(x) < 24:  # fewer rows correlate by chance
        return False

    def unit(y: Tensor) -> Tensor:
        centred = y - y.mean(0)
        return centred / centred.norm(dim=0).clamp_min(TINY)

    best, where = (unit(r).T @ unit(x)).abs().max(1)
    return float((best > 0.95).double().mean()) > 0.9 and len(where.unique()) > 0.9 * len(where)


def matched_channels(x: Tensor, r: Tensor) -> Tensor:
    """[H] bool: channels whose own values agree (difference below a tenth of the channel's size)."""
    x, r = x.double(), r.double()
    return (x - r).square().mean(0).sqrt() < 0.1 * r.square().mean(0).sqrt()


class Sketch:
    """Random projection to a few dimensions that keeps distances to about 12 %: rows of whole corpora stay comparable.

    Unit vectors are kept in float16 beside the norm, so that enormous rows survive.
    """

    def __init__(self, width: int, dims: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randn(width, dims, generator=generator) / dims**0.5

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] to projected unit vectors [..., dims] float16 and norms [...] float32."""
        x = x.float()
        norm = x.norm(dim=-1)
        return (x @ self.matrix / norm.clamp_min(TINY)[..., None]).half(), norm


def sketched_errors(x: Tensor, x_norm: Tensor, r: Tensor, r_norm: Tensor) -> Tensor:
    """Estimated relative errors |x - r| / |r| of all pairs, [M, N], from sketches x [M, D], r [N, D] and norms [M], [N]."""
    x, r = x.float(), r.float()
    ratio = x_norm[:, None] / r_norm.clamp_min(TINY)[None]
    square = ratio.square() * x.square().sum(-1)[:, None] + r.square().sum(-1)[None] - 2 * ratio * (x @ r.T)
    return square.clamp_min(0).sqrt()
