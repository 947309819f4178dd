"""A share of independent trials, with what they leave open."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""Of a 95 % interval."""


def wilson(hits: int, trials: int, z: float = Z) -> tuple[float, float] | None:
    """Wilson's score interval of hits / trials; None without a trial."""
    if trials == 0:
        return None
    share, square = hits / trials, z * z
    centre = share + square / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    low, high = (centre - spread) / (1 + square / trials), (centre + spread) / (1 + square / trials)
    return (0.0 if hits == 0 else low), (1.0 if hits == trials else high)


def at_most(hits: int, trials: int, level: float = 0.95) -> float | None:
    """The largest share under which so few hits still come with a chance of 1 - `level` (Clopper and Pearson, one-sided)."""
    from scipy.stats import beta

    if trials == 0:
        return None
    return 1.0 if hits >= trials else float(beta.ppf(level, hits + 1, trials - hits))
