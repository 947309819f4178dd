"""Mergeable statistics that need more than one slot, or whole rows: cosines between the entries of a row, and a sample of rows.

They keep the contract of `scan.accumulators`. The cosines hold on every text much alike, since a stream carries on what earlier
boundaries hold; the sample gives principal components, whose sizes no orthogonal map changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.scan import kernels
from draftscope.scan.accumulators import Moments, State, finite_rows
from draftscope.scan.shapes import COMPONENTS, ComponentsResult

SAMPLE = 256
"""Rows kept of an entry."""
_READ = 64
"""Channels that a row's key is made of."""
_MULTIPLIER = -7046029254386353131  # odd, close to 2^64 / golden ratio; products wrap around
_SHIFT = 29


@dataclass
class CosinesResult:
    """Cosines between entries of one row: [L, L] float64 mean and (population) standard deviation; None without rows."""

    count: int
    mean: Tensor | None
    std: Tensor | None


class Cosines(Moments):
    """Mean and spread of the cosine of every two entries of a row [N, L, H]; rows with NaN, infinity or a zero are left out."""

    MISFIT = "rows of {} and {} entries do not go together"

    def __init__(self, entries: int = 0, more: int | None = None) -> None:
        super().__init__(entries, entries if more is None else more)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows.flatten(1))]
        self.update_found(cosines_of(rows[(rows != 0).any(-1).all(1)]))

    def result(self) -> CosinesResult:
        if self.count == 0:
            return CosinesResult(0, None, None)
        return CosinesResult(self.count, self.mean.clone(), (self.squares / self.count).sqrt())


def cosines_of(rows: Tensor) -> Tensor:
    """Cosines between the entries of rows [N, L, H], finite and not zero: [N, L, L] float64."""
    wide = rows.double()
    table = wide @ wide.transpose(1, 2)
    size = table.diagonal(dim1=1, dim2=2).sqrt()
    return table / (size[:, :, None] * size[:, None])


class RowSample:
    """The rows whose keys, a hash of their values, are the smallest: the same rows in whichever order they came.

    Equal rows count once. Rows with NaN or infinity are left out.

    Args:
        keep: rows kept.
    """

    def __init__(self, keep: int = SAMPLE) -> None:
        self.keep = keep
        self.keys = torch.zeros(0, dtype=torch.int64)
        self.rows = torch.zeros(0, 0)

    def update(self, rows: Tensor) -> None:
        self.update_finite(rows[finite_rows(rows)])

    def update_finite(self, rows: Tensor) -> None:
        """The same from rows known to be finite."""
        if len(rows) == 0:
            return
        keys = row_keys(rows)
        few = keys.argsort(stable=True)[: 4 * self.keep]
        if len(self.keys) == self.keep:
            few = few[keys[few] < self.keys[-1]]
        self._take(keys[few], rows[few].float())

    def merge(self, other: RowSample) -> None:
        self._take(other.keys, other.rows)

    def _take(self, keys: Tensor, rows: Tensor) -> None:
        if len(keys) == 0:
            return
        if len(self.keys):
            if self.rows.shape[1] != rows.shape[1]:
                raise ValueError(f"rows of width {self.rows.shape[1]} and {rows.shape[1]} do not go together")
            keys, rows = torch.cat([self.keys, keys]), torch.cat([self.rows, rows])
        order = keys.argsort(stable=True)
        fresh = torch.ones(len(order), dtype=torch.bool)
        fresh[1:] = keys[order].diff() != 0
        chosen = order[fresh][: self.keep]
        self.keys, self.rows = keys[chosen].clone(), rows[chosen].clone()

    def state(self) -> State:
        return {"keep": torch.tensor(self.keep), "keys": self.keys, "rows": self.rows}

    @classmethod
    def from_state(cls, state: State) -> RowSample:
        made = cls(int(state["keep"]))
        made.keys, made.rows = state["keys"].clone(), state["rows"].clone()
        return made

    def result(self) -> ComponentsResult:
        if len(self.rows) < 2:
            return ComponentsResult(len(self.rows), None, None)
        # Scaled, so that the squares of huge values stay finite.
        size = self.rows.abs().max().double().clamp_min(1e-300)
        centred = self.rows.double() / size
        values = torch.linalg.svdvals(centred - centred.mean(0)).square() / len(centred)
        total = values.sum()
        shares = values[:COMPONENTS] / total if total > 0 else torch.zeros_like(values[:COMPONENTS])
        return ComponentsResult(len(self.rows), float(total * size.square()), shares)


def row_keys(rows: Tensor) -> Tensor:
    """[N] int64 of rows [N, H]: the same for equal values, whatever the dtype; made of some channels, evenly spread."""
    channels = torch.linspace(0, rows.shape[1] - 1, min(_READ, rows.shape[1])).long()
    bits = (rows[:, channels].float() + 0.0).view(torch.int32).long()  # + 0.0: minus zero is zero
    mixed = kernels.mixed(bits, _MULTIPLIER, _SHIFT)
    if mixed is not None:
        return mixed
    key = torch.zeros(len(rows), dtype=torch.int64)
    for column in bits.unbind(1):
        key = (key ^ column) * _MULTIPLIER
        key = key ^ (key >> _SHIFT)
    return key
