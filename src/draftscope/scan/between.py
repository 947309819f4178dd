"""How much sequences differ from each other: what an estimate from some of them may be off by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import State
from draftscope.scan.core import CELLS, RANGES
from draftscope.scan.statistics import CLASSES, RowClass

CONFIDENCE = 0.95
_CLASS = np.array([0, 1, *[2] * RANGES, *[3] * RANGES])
assert len(_CLASS) == CELLS


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; None where fewer than two sequences were seen."""

    value: float
    low: float | None
    high: float | None


class Between:
    """Of every entry and class: each sequence's rows, rows of the class, and the sum of their norms; means and comoments.

    A figure of all rows is the ratio of two such means. Its interval is that of the ratio estimator under sampling of sequences
    without replacement (Cochran, Sampling Techniques, 1977, chapter 6), with Student's t.
    """

    def __init__(self, entries: int = 0) -> None:
        self.count = 0
        self.mean = np.zeros((entries, len(CLASSES), 3))
        self.squares = np.zeros((entries, len(CLASSES), 3, 3))

    def add_sequence(self, norms: np.ndarray, cells: np.ndarray) -> None:
        """Norms [L, T] and cells [L, T] of one sequence; norms that are not finite count as rows alone."""
        entries, rows = norms.shape
        classes = _CLASS[cells] + len(CLASSES) * np.arange(entries)[:, None]
        size = entries * len(CLASSES)
        finite = np.where(np.isfinite(norms), norms, 0)
        found = np.stack([
            np.full(size, float(rows)), np.bincount(classes.ravel(), minlength=size).astype(float),
            np.bincount(classes.ravel(), weights=finite.ravel(), minlength=size),
        ], 1).reshape(entries, len(CLASSES), 3)
        part = Between(entries)
        part.count, part.mean = 1, found
        self.merge(part)

    def merge(self, other: Between) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.squares = other.count, other.mean.copy(), other.squares.copy()
            return
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"sequences of {len(self.mean)} and {len(other.mean)} entries do not go together")
        count = self.count + other.count
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / count)
        products = delta[..., :, None] * delta[..., None, :]
        self.squares = self.squares + other.squares + products * (self.count * other.count / count)
        self.count = count

    def state(self) -> State:
        return {"count": torch.tensor(self.count), "mean": torch.tensor(self.mean), "squares": torch.tensor(self.squares)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Between:
        made = cls()
        made.count, made.mean, made.squares = int(state["count"]), state["mean"].clone().numpy(), state["squares"].clone().numpy()
        return made

    def norm(self, entry: int, row_class: RowClass, of: int | None = None) -> Estimate | None:
        """Mean norm of a class's rows; None where it has none. `of`: sequences in all, None = many more than were seen."""
        return self._ratio(entry, row_class, 2, 1, of)

    def share(self, entry: int, row_class: RowClass, of: int | None = None) -> Estimate | None:
        """Share of rows that are of a class."""
        return self._ratio(entry, row_class, 1, 0, of)

    def _ratio(self, entry: int, row_class: RowClass, above: int, below: int, of: int | None) -> Estimate | None:
        if self.count == 0:
            return None
        at = CLASSES.index(row_class)
        mean, comoments = self.mean[entry, at], self.squares[entry, at]
        if mean[below] == 0:
            return None
        value = float(mean[above] / mean[below])
        if self.count < 2:
            return Estimate(value, None, None)
        from scipy.stats import t

        residual = comoments[above, above] - 2 * value * comoments[above, below] + value**2 * comoments[below, below]
        spread = max(float(residual), 0.0) / (self.count - 1)
        left = 1.0 if of is None else max(0.0, 1 - self.count / of)
        off = float(t.ppf(0.5 + CONFIDENCE / 2, self.count - 1)) * (left * spread / self.count) ** 0.5 / float(mean[below])
        return Estimate(value, value - off, value + off)
