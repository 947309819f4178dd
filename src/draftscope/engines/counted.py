"""Acceptance as counted: verify steps, accepted drafts, what was reported besides, and what speaks against believing it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftscope.engines.definitions import Figure, Shape
from draftscope.engines.settings import Distortion
from draftscope.errors import DraftscopeError

FEWEST = 100
"""Verify steps from which a pattern in the counts means something."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Verify steps and accepted drafts.

    Attributes:
        drafts: verify steps; 0 where only averages are known.
        accepted: [K], steps in which position k was accepted (unconditional counts); empty where only the total is known.
        total: accepted drafts in all.
        says: where the figures come from.
        stated: the accept length where no counts are known, only an average of the engine's.
        shape: what is verified in a step, as far as known.
        figures: every figure as the engine reports it, with what it means.
        caveats: what makes the figures less than exact.
        distortions: settings under which they are not those of lossless verification.
        unknown: figures whose definition nobody knows, by name: a number or one for each position.
    """

    drafts: int
    accepted: tuple[int, ...]
    total: int
    says: str
    stated: float | None = None
    shape: Shape = field(default_factory=Shape)
    figures: tuple[Figure, ...] = ()
    caveats: tuple[str, ...] = ()
    distortions: tuple[Distortion, ...] = ()
    unknown: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def length(self) -> float | None:
        """Mean tokens per verify step, bonus included; None without steps."""
        return 1 + self.total / self.drafts if self.drafts else self.stated

    @property
    def k(self) -> int | None:
        """The most drafts that one step can accept; None = not known."""
        return len(self.accepted) or self.shape.k

    @property
    def simulated(self) -> bool:
        return any(d.simulated for d in self.distortions)

    @property
    def joint(self) -> list[float]:
        """Share of the steps that accepted position k, [K]; empty where positions are not known."""
        return [n / self.drafts for n in self.accepted] if self.drafts else []

    def too_regular(self) -> bool:
        """Whether every step accepted one of two neighbouring counts: as simulation does, and no draft that sometimes errs.

        Drafts that never err accept all K; those that always err none.
        """
        if len(self.accepted) < 2 or self.drafts < FEWEST:
            return False
        certain = sum(n == self.drafts for n in self.accepted)
        possible = sum(n > 0 for n in self.accepted)
        return possible - certain <= 1 and certain >= (1 if possible < len(self.accepted) else 2) and certain < len(self.accepted)

    def checked(self, where: str) -> Counters:
        """Itself.

        Raises:
            DraftscopeError: counts that contradict each other.
        """
        falling = all(a >= b for a, b in zip(self.accepted, self.accepted[1:], strict=False))
        if min(self.drafts, self.total, *self.accepted, 0) < 0:
            raise DraftscopeError("holds a negative count", where=where, remedy="Scrape once, at rest")
        if self.accepted and (self.accepted[0] > self.drafts or not falling):
            raise DraftscopeError(
                f"{self.drafts} steps with {list(self.accepted)} accepted per position contradict each other", where=where,
                remedy="Accepted counts can't exceed the steps, nor rise with the position: scrape once, at rest")
        k = self.k
        if k is not None and self.drafts and self.total > k * self.drafts * 1.01 + k:
            raise DraftscopeError(
                f"{self.total} accepted drafts in {self.drafts} steps of at most {k} contradict each other", where=where,
                remedy="Scrape once, at rest")
        if k is not None and self.stated is not None and not 0.99 <= self.stated <= k + 1.01:
            raise DraftscopeError(f"an accept length of {self.stated:.3f} contradicts at most {k} drafts a step", where=where,
                                  remedy="The figures are of different servers or settings")
        return self

    def with_shape(self, shape: Shape) -> Counters:
        """With what is known from elsewhere of a step, where it knows less itself."""
        mine = self.shape
        merged = Shape(mine.nodes or shape.nodes, mine.steps or shape.steps, mine.topk or shape.topk)
        return replace(self, shape=merged)
