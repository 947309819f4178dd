"""rope: the draft's queries and keys are turned by another rotary table than in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, reads_otherwise, tried_in_vain

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_ENGINE = {
    "theta a million": {**_PLAIN, "rope_theta": 1e6},
    "theta 500000": {**_PLAIN, "rope_theta": 5e5},
    "scaling that the draft lacks": {**_PLAIN, "rope_type": "linear", "factor": 4.0},
    "half of each head": {**_PLAIN, "partial_rotary_factor": 0.5},
}
_CONFIGURED = {
    "scaling dropped": {**_PLAIN, "rope_type": "linear", "factor": 1.25},
}
_FIXES = {
    "": "Give the draft a rotary table of its own, with the `rope_theta`, scaling and `partial_rotary_factor` of its own "
        "configuration, "
        "in the spelling that the engine reads (`rope_parameters` in new ones, `rope_theta` and `rope_scaling` in old ones).",
}


class Rope(Fault):
    """Another base, a scaling dropped or added, the target's table, another share of the head turned."""

    id = "rope"
    title = "another rotary table"
    verdict = "wiring"
    variants = (*_ENGINE, *_CONFIGURED)
    page = Page(
        symptom="Acceptance a little lower, more so at long context; states and weights are right.",
        traces={
            "theta a million": Trace("the engine takes the target's theta, or a default", _TAKES,
                                     "every state off, more with distance; alike with that theta alone", "measured"),
            "theta 500000": Trace("the same, of another target", _TAKES, "the same", "measured"),
            "scaling that the draft lacks": Trace("the engine shares the target's scaled table with the draft", _TAKES,
                                                  "every state off; alike with that scaling alone", "measured"),
            "half of each head": Trace("the engine takes the target's partial rotary factor for the draft", _TAKES,
                                       "every state off; alike with that factor alone", "measured"),
            "scaling dropped": Trace("the draft's configuration scales, the engine (or a converter before it) reads no such key",
                                     _TAKES, "every state off; alike without scaling alone", "measured"),
        },
        lookalikes={
            "pos-id": "is off between parts of the text only, a table at every distance",
            "weight-missing": "a layer with other weights is off in the first row of all, a table is not",
            "ctx-limit": "states match the replay at every length",
            "attn-mask": "a window leaves the rows before it alike",
        },
        unseen={
            "partial rotary ignored": "the gate tries it, but no draft here was trained with a part of the head to plant it on",
            "trained with another theta than configured": "engine and replay agree then; it costs what the trained rung shows "
                                                          "and "
                                                          "is told on training states alone",
            "tables of unknown theta": "thetas other than the usual ones, the target's and the draft's are not tried",
        },
        reports=("SpecForge issue #265", "speculators PR #574", "vllm-ascend issue #6612", "NeMo Automodel PR #2399"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = from_trials(m, self.id, {"": "config rope_parameters"}, _FIXES)
        for suspicion in found:
            suspicion.caveats.append("short requests show little of it: expect more at long context")
        return found

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "another rotary table would put every state off, more with the distance to the prompt")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant in _ENGINE:
            return reads_otherwise(plant, rope_parameters=_ENGINE[variant])
        if variant in _CONFIGURED:
            meant = _CONFIGURED[variant]
            scaling = {key: value for key, value in meant.items() if key != "rope_theta"}
            configured = replace(plant, config=(*plant.config, ("rope_parameters", meant), ("rope_scaling", scaling)))
            return reads_otherwise(configured, rope_parameters=_PLAIN)
        raise ValueError(f"rope has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        settings = {name: value for name, value in plant.engine.settings.items() if name != "rope_parameters"}
        return replace(plant, engine=replace(plant.engine, settings=settings))
