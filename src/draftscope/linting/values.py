"""Values that betray a tensor nobody trained or filled: NaN, zeros, norms of ones, an initialiser's spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.findings import Finding
from draftscope.linting.finding import finding

BLOCK = 2**24
SAMPLE_ROWS = 512
LIKE_DRAWN = 1.25
"""Rows' and columns' norms of a freshly drawn matrix scatter as chance has it; training scatters them more than this."""


def poisoned(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Tensors with NaN or Inf, and how many such values each holds."""
    return {name: count for name, tensor in tensors if (count := nonfinite(tensor))}


def nonfinite(tensor: Tensor) -> int:
    """How many values of a tensor of any dtype are NaN or Inf, counted in blocks."""
    return sum(int((~block.isfinite()).sum()) for block in _blocks(tensor)) if tensor.dtype.is_floating_point else 0


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    return (block.float() for block in tensor.flatten().split(BLOCK) if len(block))


def unsound(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Finding]:
    """NaN or Inf, and tensors of zeros alone; one tensor is held at a time."""
    bad: dict[str, int] = {}
    zero: list[str] = []
    for name, tensor in tensors:
        if not tensor.dtype.is_floating_point or tensor.numel() == 0:
            continue
        if count := nonfinite(tensor):
            bad[name] = count
        elif not any(bool(block.any()) for block in _blocks(tensor)):
            zero.append(name)
    if bad:
        yield finding(
            "nonfinite", [f"tensor {name}" for name in list(bad)[:8]], f"NaN or Inf in {len(bad)} tensors", "proven",
            "needs-retraining", "Go back to the last checkpoint without them", measured="every value of every tensor",
            result=", ".join(f"{name}: {count}" for name, count in list(bad.items())[:16]), healthy="no value is NaN or Inf",
            figures=bad,
        )
    if zero:
        yield finding(
            "weight-missing", [f"tensor {name}" for name in zero[:8]], f"{len(zero)} tensors hold nothing but zeros", "suspected",
            "needs-retraining", "Export the checkpoint again: these look as if they were never filled",
            measured="every value of every tensor", result=", ".join(zero[:16]), healthy="trained weights are not all zero",
        )


def missing_tensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Parameters that the configuration asks for and the files lack; the vocabulary map is not one of them."""
    whole = checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size
    missing = [name for name in checkpoint.missing if name not in ("d2t", "t2d") and not (name == "lm_head.weight" and whole)]
    if missing:
        yield finding(
            "weight-missing", [f"tensor {name}" for name in missing[:8]],
            f"{len(missing)} tensors are missing" if len(missing) > 1 else f"{missing[0]} is missing", "proven",
            "needs-retraining", "Export the checkpoint again; engines leave a missing tensor at its initial value silently",
            measured="tensors of the files against those that the configuration asks for", result=", ".join(missing[:16]),
            healthy="all are there",
        )


def untouched(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Norms that are exactly 1, and matrices that scatter like an initialiser's."""
    ones, norms, drawn = initial_looks(checkpoint)
    if ones:
        every = len(ones) == norms
        yield finding(
            "weight-missing", [f"tensor {name}" for name in ones[:8]],
            f"{'all' if every else len(ones)} {'norms are' if len(ones) > 1 else 'norm is'} exactly 1, as before any training",
            "suspected" if every or 2 * len(ones) > norms else "supported", "needs-retraining",
            "Export again from the trainer's state, and look for these names in its log of missing keys",
            measured="every value of every norm", result=f"exactly 1: {', '.join(ones[:16])}; of {norms} norms",
            healthy="trained norms differ from 1",
            caveats=["bfloat16 weights without a master copy move in steps of 1/256 near 1: a short training may not reach one"],
        )
    if drawn:
        yield finding(
            "weight-missing", [f"tensor {name}" for name in list(drawn)[:8]],
            f"{len(drawn)} matrices scatter like freshly drawn ones", "suspected", "needs-retraining",
            "Export again: these look like a module's initial values, which no file ever filled",
            measured="spread, kurtosis, and how norms of rows and columns scatter",
            result="; ".join(f"{name}: {how.words}" for name, how in list(drawn.items())[:16]),
            healthy="rows and columns of trained matrices differ in size by more than chance",
            figures={name: {"std": how.std, "kurtosis": how.kurtosis} for name, how in drawn.items()},
            caveats=["a matrix that was hardly trained looks the same"],
        )


def initial_looks(checkpoint: Checkpoint) -> tuple[list[str], int, dict[str, Drawn]]:
    """Norms that are exactly 1, how many norms there are, and matrices that scatter like an initialiser's."""
    norms = {name: t for name, t in checkpoint.tensors.items() if t.ndim == 1 and t.dtype.is_floating_point and "norm" in name}
    ones = [name for name, tensor in norms.items() if bool((tensor == 1).all())]
    drawn = {name: how for name, tensor in checkpoint.tensors.items() if (how := _drawn(tensor, checkpoint)) is not None}
    drawn.pop("embed_tokens.weight", None)
    return ones, len(norms), drawn


@dataclass(frozen=True, slots=True)
class Drawn:
    std: float
    kurtosis: float
    words: str


def _drawn(tensor: Tensor, checkpoint: Checkpoint) -> Drawn | None:
    """Whether a matrix [out, in] looks like N(0, s) or U(-b, b) with a known initialiser's s or b."""
    if tensor.ndim != 2 or not tensor.dtype.is_floating_point or min(tensor.shape) < 16:
        return None
    rows = tensor[:: max(1, len(tensor) // SAMPLE_ROWS)].double()
    if not bool(rows.isfinite().all()):
        return None
    mean, std = float(rows.mean()), float(rows.std())
    if std == 0 or abs(mean) > 0.02 * std + 4 * std / math.sqrt(rows.numel()):
        return None
    kurtosis = float(((rows - mean) / std).pow(4).mean())
    if max(_scatter(rows, kurtosis), _scatter(rows.T, kurtosis)) > LIKE_DRAWN:
        return None
    slack = 0.01 + 3 * math.sqrt((kurtosis - 1) / rows.numel())
    wide = tensor.shape[1]
    initial = checkpoint.raw.get("initializer_range", 0.02)
    spreads = [(float(s), 3.0, f"N(0, {s:g})") for s in {0.02, initial, 0.01, 0.006} if isinstance(s, int | float) and s > 0]
    spreads.append((1 / math.sqrt(3 * wide), 1.8, f"U(±1/√{wide}), torch's default"))
    for expected, shape, words in spreads:
        if abs(std / expected - 1) < slack and abs(kurtosis - shape) < 0.1 + 10 / math.sqrt(rows.numel()):
            return Drawn(std, kurtosis, f"std {std:.4g}, as of {words}")
    return None


def _scatter(rows: Tensor, kurtosis: float) -> float:
    """How much mean squares of rows vary, 1 = as those of independent draws do."""
    squares = rows.square().mean(1)
    chance = math.sqrt(max(kurtosis - 1, 0.1) / rows.shape[1])
    return float(squares.std() / squares.mean() / chance) if len(squares) > 8 else 1.0


def checkpoint_values(checkpoint: Checkpoint) -> Iterator[Finding]:
    """All of it, for a checkpoint."""
    yield from unsound(checkpoint.tensors.items())
    yield from missing_tensors(checkpoint)
    with torch.no_grad():
        yield from untouched(checkpoint)
