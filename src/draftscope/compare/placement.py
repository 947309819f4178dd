"""What each slot is: argmax over every place of the target on the same tokens.

Never an absolute threshold on a cosine: neighbouring boundaries resemble each other (in the middle of SmolLM2 they differ by
10 to 20 %, in deeper targets by less), so a slot is the place that it is nearest to, and how much nearer decides what can
be said.

*Error* of a row under a place: |x - r| / |r|. Error of a slot: the median over rows that are neither sinks (norm above ten
times that sequence's median) nor first tokens; those two are reported apart. Typical errors of the right place: 0 (same
kernels, float32), 2e-3 (bfloat16 storage), 1e-2 (other kernels or bfloat16 arithmetic, summed over layers), several 1e-2
(8-bit targets), up to about 0.2 (4-bit targets).

Rules, in order; each later reading has to explain clearly more than the one before (half its error or less, and at least
twice the rows):

1. plain: the place of least error;
2. lag d = -2..2: row t holds the state of token t+d;
3. scale: one constant factor s per slot (the median over rows), reported where |s - 1| > 0.02, alone or with a lag;
4. direction: every row has a factor of its own (a norm without weights was applied);
5. where the median fails (above 0.1): a place and lag that holds within 0.1 for at least a tenth of the rows, and for most
   of those that match anything; error and margin are then over these rows, and `share` says how many they are;
   otherwise an error above 0.3 places nothing;
6. rows moved: most rows are found at another row of the same sequence, or of another one;
7. an orthogonal map (rotated basis, re-ordered channels): the cosines between rows agree, the rows do not.

If nothing explains the slot its boundary is None. *Candidates* are the places that cannot be told apart: those whose error is
within a tenth of the best (the distance between the two is then less than half of the noise), or to which the best is not
nearer in clearly more rows than chance allows (sign test, 1 %).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from draftscope.compare.evidence import Evidence, Sweep
from draftscope.compare.judging import judge
from draftscope.compare.lagging import with_lags
from draftscope.compare.placed import Moved, Placed, Transform

__all__ = ["Moved", "Placed", "Placer", "Transform", "place"]


class Placer:
    """Places the slots of a source from any number of its sequences, in bounded memory.

    Args:
        rows: rows whose errors are kept (those with the lowest hash of sequence name and row number); the medians and
            shares of `result` are over these.
        whole_bytes: memory for rows kept whole, of those that no place and lag explains.
        reference_rows: rows of the target that moved rows are looked for in.
    """

    def __init__(self, rows: int = 2048, *, whole_bytes: int = 2**27, reference_rows: int = 2**14) -> None:
        self.evidence = Evidence(rows, whole_bytes=whole_bytes, reference_rows=reference_rows)

    def update(self, slots: Tensor, swept: Sweep, verify: Tensor | None = None) -> None:
        """Take in one sequence.

        Args:
            slots: [T, S, Ht], any float dtype; row t was labelled with token t of the sweep.
            swept: every place of the target over the same tokens; at least T of them.
            verify: [T] bool, rows of verify steps, which `result` can tell apart from the others.

        Raises:
            ValueError: the shapes do not fit each other.
        """
        self.evidence.update(slots, swept, verify)

    def result(self, verify: bool | None = None) -> list[Placed]:
        """One `Placed` per slot, of all rows or of one phase's alone; empty before the first sequence."""
        slots = range(len(self.evidence.seen.get("first", ())))
        return [with_lags(judge(self.evidence, slot, verify), self.evidence, verify) for slot in slots]


def place(pairs: Iterable[tuple[Tensor, Sweep]], *, rows: int = 2048) -> list[Placed]:
    """Place the slots of (slots [T, S, Ht], sweep over the same tokens) pairs; see `Placer`."""
    placer = Placer(rows)
    for slots, swept in pairs:
        placer.update(slots, swept)
    return placer.result()
