"""token-shift: the row labelled t holds the state of another token, a constant distance away."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.changes import Own, Shift
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.rowcause import claimed
from draftscope.faults.slots import in_words, strength
from draftscope.findings import Evidence, Fix, Placed
from draftscope.target.spoiling import Phase, Shifted

PARTLY, WHOLE = 0.1, 0.9
INPUTS = "--train, --serve, --target"
PHASED = INPUTS + " (a capture that says which rows are verify steps')"


@dataclass(frozen=True, slots=True)
class _Lagged:
    """A slot whose rows are displaced by so many tokens.

    Attributes:
        share: of its rows, or of the rows of `phase` where only these are displaced.
        whole: nearly all rows are, in either phase.
    """

    slot: int
    got: Placed
    lag: int
    share: float
    phase: Phase | None
    whole: bool
    scale: float


class TokenShift(Fault):
    """State, token and label are misaligned by a constant: a gather index off by one, a roll on one side only."""

    id = "token-shift"
    title = "rows of another token"
    verdict = "wiring"
    variants = ("-1", "+1", "+2", "-2", "one slot +1", "prefill rows +1", "verify rows -1", "train +1", "train -1",
                "train labels rolled")
    includes = frozenset({"nonfinite"})
    page = Page(
        symptom="Accept length near 1, or clearly lower from the first position on; training metrics are good.",
        traces={
            "-1": Trace("The engine's gather index points at the row before the last accepted token.", INPUTS,
                        "Rows equal the right boundary one token earlier.", "served"),
            "+1": Trace("A roll of states that belongs to the tokens.", INPUTS,
                        "Rows equal the right boundary one token later.", "served"),
            "+2": Trace("The roll is applied twice.", INPUTS, "The lag is two.", "served"),
            "-2": Trace("An index counts the bonus token as well.", INPUTS, "The lag is two, the other way.", "served"),
            "one slot +1": Trace("One captured state is taken after a later kernel has moved its rows on.", INPUTS,
                                 "One slot lags, the others do not.", "served"),
            "prefill rows +1": Trace("Only the prefill path rolls the states.", PHASED,
                                     "The prompt's rows lag, those of verify steps do not.", "served"),
            "verify rows -1": Trace("The index of accepted rows is off by one in verify steps.", PHASED,
                                    "Rows of verify steps lag within their step, the prompt's do not.", "served"),
            "train +1": Trace("The data writer rolls states against tokens.", "--train, --serve, --draft, --target",
                              "The training files' slots lag and their last state does not.", "trained"),
            "train -1": Trace("As before, the other way.", "--train, --serve, --draft, --target", "As before.", "trained"),
            "train labels rolled": Trace("The data writer rolls tokens and loss mask against all states, the last included.",
                                         "--train, --serve, --draft, --target",
                                         "Slots and last state lag alike.", "trained"),
        },
        lookalikes={
            "layer-offset": "a step along the layers fits, at lag 0",
            "req-mix": "rows are found in another request, or at no constant distance",
            "graph-capture": "rows equal those of an earlier batch, bit for bit",
            "pos-id": "states are where they belong; only the draft's positions differ",
        },
        unseen={"a shift in engines that keep a step's first row": "with hardly any draft accepted, rows of verify steps cannot "
                "show it: only the prompt's do"},
        reports=("SpecForge PR #472", "vllm-ascend PR #2793"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side = m.train if m.departed == "train" else m.serve
        if side is None or m.reference is None:
            return []
        apart = claimed(m, side)
        found = [lagged for got, want in zip(side.slots, m.reference, strict=False)
                 if got.slot not in apart and (lagged := _lagged(side, got, want)) is not None]
        if not found:
            return []
        serve = side.name == "serve"
        lags = sorted({one.lag for one in found})
        whole = all(one.whole for one in found)
        phases = {one.phase for one in found}
        rows = in_words(next(iter(phases))) if len(phases) == 1 else ""
        partly = "" if whole or rows else f", in {max(one.share for one in found):.0%} of the rows"
        where = [side.where(one.slot) for one in found]
        only = "" if len(found) == len(side.slots) else f" in {', '.join(where)}"
        last = side.last is not None and bool(side.last.lag)
        undo = Undo(states=tuple(
            Shift(one.slot, -one.lag) if whole else Own(one.slot, one.scale, phase=one.phase) for one in found))
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=where,
                says=f"{of_side(side.name)}{only} are shifted against their tokens{rows}: the row labelled t holds the state of "
                f"token {' or '.join(f't{lag:+d}' for lag in lags)}{partly}"
                + ("; the last state is shifted with them, so that it is tokens and mask that were rolled" if last else ""),
                strength=strength(side),
                evidence=[
                    Evidence(
                        hypothesis="rows and tokens are misaligned by a constant",
                        prediction="the error against the right boundary is least at a lag other than 0",
                        measurement="relative error of every row at lags -2..+2 within its sequence",
                        result="; ".join(
                            f"{side.where(one.slot)}: lag {one.lag:+d} fits {one.share:.0%} of the rows{in_words(one.phase)} "
                            f"(error {one.got.error or 0:.2g})"
                            for one in found
                        ),
                        decides="token-shift if a lag along the tokens fits; layer-offset if a step along the layers does",
                        figures={
                            side.where(one.slot): {"lag": one.lag, "share": one.share, "boundary": one.got.boundary,
                                                   "phase": one.phase, "shares": one.got.shares}
                            for one in found
                        },
                    )
                ],
                fix=Fix(
                    says="Row t must hold the target's state at token t (and the embedding of token t+1): look for a gather "
                    f"index or a roll that is off{', on the path that makes the rows' + rows if rows else ''}."
                    + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=undo if serve else None,
            )
        ]

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if side.slots and m.reference is not None:
                return "rows fit best at their own token: " + ", ".join(
                    f"{side.where(p.slot)} lag {p.lag or 0:+d} for {p.share or 0:.0%}" for p in side.slots)
        return "no row was held against the states of its neighbours: give the target (--target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        made = {
            "-1": Shifted(-1), "+1": Shifted(1), "+2": Shifted(2), "-2": Shifted(-2), "one slot +1": Shifted(1, (1,)),
            "prefill rows +1": Shifted(1, phase="prefill"), "verify rows -1": Shifted(-1, phase="verify"),
        }
        if variant not in self.variants:
            raise ValueError(f"token-shift has no variant {variant!r}")
        if variant == "train labels rolled":
            rolled = Shifted(1)
            return replace(plant, last=(*plant.last, rolled),
                           train=replace(plant.train, spoilers=(*plant.train.spoilers, rolled)))
        spoiler = made[variant.removeprefix("train ")]
        if variant.startswith("train"):
            return replace(plant, train=replace(plant.train, spoilers=(*plant.train.spoilers, spoiler)))
        return replace(plant, serve=replace(plant.serve, spoilers=(*plant.serve.spoilers, spoiler)))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        kept = tuple(s for s in plant.serve.spoilers if not isinstance(s, Shifted))
        return replace(plant, serve=replace(plant.serve, shift=0, spoilers=kept))


def _lagged(side: SideFacts, got: Placed, want: Placed) -> _Lagged | None:
    """By how many tokens a slot's rows are displaced; None = they are not.

    An engine that errs inside the block of rows of one pass leaves the block's edge rows in place, so that with few accepted
    drafts only the prompt's rows show it.
    """
    if got.boundary is None and not side.detail.phases:
        return None
    lag, share = _shift(got, want)
    phases: dict[Phase, Placed] = {p: slots[got.slot] for p, slots in side.detail.phases.items() if got.slot < len(slots)}
    shifts = {phase: _shift(placed, want) for phase, placed in phases.items()}
    only: Phase | None = None
    if any(found for found, _ in shifts.values()):
        phase = max(shifts, key=lambda one: shifts[one][1])
        sound = [p for p, placed in phases.items() if p != phase and _at(placed, 0, want) > WHOLE]
        if sound or not lag:
            (lag, share), got = shifts[phase], phases[phase]
        only = phase if sound else None
    if not lag:
        return None
    whole = all(_at(placed, lag, want) > WHOLE for placed in (phases.values() if phases else (got,)))
    return _Lagged(got.slot, got, lag, share, only, whole, (got.scale or 1.0) / (want.scale or 1.0))


def _at(got: Placed, lag: int, want: Placed) -> float:
    """Share of a slot's rows that are displaced by so much."""
    if got.boundary is not None and (got.lag or 0) - (want.lag or 0) == lag:
        return got.shares.get("matched", got.share or 0.0)
    return got.shares.get(f"lag {lag:+d}" if lag else "lag 0", 0.0)


def _shift(got: Placed, want: Placed) -> tuple[int, float]:
    """The displacement of a part of a slot's rows, the most common one, and the share of rows that have it; (0, 0.0) = none."""
    if got.boundary is None:
        return 0, 0.0
    lag = (got.lag or 0) - (want.lag or 0)
    if lag:
        return lag, got.shares.get("matched", got.share or 0.0)
    shares = {int(name[4:]): share for name, share in got.shares.items() if name.startswith("lag ") and share >= PARTLY}
    if want.lag or not shares:
        return 0, 0.0
    best = max(shares, key=lambda shift: shares[shift])
    return best, shares[best]
