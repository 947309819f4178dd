"""Faults at strengths and places that are none of their variants: what the rules were not tuned on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from draftscope.boundaries import Boundary, Kind
from draftscope.faults.plant import Plant
from draftscope.target.spoiling import Scaled, Shifted, Spoiler, Turned
from draftscope.target.wiring import Wiring

Drawn = tuple[str, Plant]


def _sides(plant: Plant, draw: random.Random, made: Callable[[Wiring], Wiring]) -> Drawn:
    """The change on one side, drawn: two times of three where it serves."""
    if draw.random() < 2 / 3:
        return "", replace(plant, serve=made(plant.serve))
    return "train ", replace(plant, train=made(plant.train))


def _scale(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    slots = len(plant.serve.slots)
    which = tuple(sorted(draw.sample(range(slots), draw.choice([1, 1, 2, slots]))))
    factor = float(f"{math.exp(draw.choice([-1, 1]) * draw.uniform(math.log(1.08), math.log(30))):.3g}")
    if draw.random() < 1 / 3:
        scaled = Scaled(factor, which, phase="verify")
        return f"slots {list(which)} x{factor:g} when verifying", replace(plant, serve=_spoilt(plant.serve, scaled))
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Scaled(factor, which)))
    return f"{side}slots {list(which)} x{factor:g}", made


def _spoilt(wiring: Wiring, spoiler: Spoiler) -> Wiring:
    return replace(wiring, spoilers=(*wiring.spoilers, spoiler))


def _turned(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    which = tuple(sorted(draw.sample(range(len(plant.serve.slots)), draw.choice([1, 2, 3]))))
    seed = draw.randrange(1000, 9999)
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Turned(slots=which, seed=seed)))
    return f"{side}slots {list(which)} in basis {seed}", made


def _moved(plant: Plant, draw: random.Random, wanted: list[int]) -> Drawn:
    slots = tuple(Boundary(b) for b in wanted)
    side, made = _sides(plant, draw, lambda w: replace(w, slots=slots))
    return f"{side}boundaries {wanted}", made


def _offset(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = [slot.index for slot in plant.serve.slots]
    step = draw.choice([-1, 1])
    # Fewer slots than all: that all are moved is a variant.
    which = draw.sample(range(len(own)), draw.randrange(1, len(own)))
    return _moved(plant, draw, [min(max(b + step, 0), layers) if i in which else b for i, b in enumerate(own)])


def _set(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = [slot.index for slot in plant.serve.slots]
    while True:
        wanted = [draw.randrange(layers + 1) if draw.random() < 0.7 else b for b in own]
        steps = {w - b for w, b in zip(wanted, own, strict=True) if w != b}
        if steps and steps not in ({1}, {-1}):
            return _moved(plant, draw, wanted)


def _partial(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = plant.serve.slots
    which = draw.sample(range(len(own)), draw.randrange(1, len(own) + 1))
    kind: Kind = draw.choice(["branch", "partial"])
    slots = tuple(Boundary(slot.index, "pre", kind) if i in which else slot for i, slot in enumerate(own))
    side, made = _sides(plant, draw, lambda w: replace(w, slots=slots))
    return f"{side}{kind} in slots {sorted(which)}", made


def _shift(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    by = draw.choice([-2, -1, 1, 2])
    which = tuple(sorted(draw.sample(range(len(plant.serve.slots)), draw.choice([1, 2])))) if draw.random() < 2 / 3 else ()
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Shifted(by, which)))
    return f"{side}{f'slots {list(which)} ' if which else ''}{by:+d}", made


def _poison(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    rows = draw.choice([1, 2, 5, 11])
    side, made = _sides(plant, draw, lambda w: replace(w, poison=rows))
    return f"{side}{rows} rows", made


def _budget(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    sequences = draw.choice([1, 2, 3, 5])
    return f"{sequences} sequences", replace(plant, training_sequences=sequences)


OTHERS: dict[str, Callable[[Plant, random.Random, int], Drawn]] = {
    "layer-offset": _offset, "layer-set": _set, "residual-missing": _partial, "scale-mult": _scale, "token-shift": _shift,
    "nonfinite": _poison, "train-budget": _budget, "rotated-space": _turned,
}
"""By fault id: what was done in words, and the set-up, drawn for a target of so many layers."""
