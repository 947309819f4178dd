"""rope: the draft's queries and keys are turned by another rotary table than in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.checking import told
from draftscope.faults.facts_checkpoint import OtherTheta
from draftscope.faults.fixes import plain_keys
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, reads_otherwise, tried_in_vain
from draftscope.findings import Patch

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_FAR, _NEAR = "another theta", "another theta, nearer"
_SCALED: dict[str, dict[str, Any]] = {
    "scaling that the draft lacks": {"rope_type": "linear", "factor": 4.0},
    "half of each head": {"partial_rotary_factor": 0.5},
}
_DROPPED = "scaling dropped"
_CHECKPOINT = "checkpoint: "
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
    variants = (_FAR, _NEAR, *_SCALED, _DROPPED, _CHECKPOINT + _FAR, _CHECKPOINT + _NEAR)
    page = Page(
        symptom="Acceptance a little lower, more so at long context; states and weights are right.",
        traces={
            _FAR: Trace("the engine takes the target's theta, or a default: a million, or ten thousand where the draft's is "
                        "large", _TAKES, "every state off, more with distance; alike with that theta alone", "measured"),
            _NEAR: Trace("the same, of another target: half a million, or a million where the draft has that", _TAKES,
                         "the same", "measured"),
            "scaling that the draft lacks": Trace("the engine shares the target's scaled table with the draft", _TAKES,
                                                  "every state off; alike with that scaling alone", "measured"),
            "half of each head": Trace("the engine takes the target's partial rotary factor for the draft", _TAKES,
                                       "every state off; alike with that factor alone", "measured"),
            "scaling dropped": Trace("the draft's configuration scales, the engine (or a converter before it) reads no such key",
                                     _TAKES, "every state off; alike without scaling alone", "measured"),
            _CHECKPOINT + _FAR: Trace("the trainer used its default theta and wrote the target's into config.json",
                                                 "--train, --draft, --target", "-log p on the training states falls with "
                                                 "another of the usual thetas, paired by sequence", "trained"),
            _CHECKPOINT + _NEAR: Trace("the same, nearer to the right one", "--train, --draft, --target", "the same",
                                              "trained"),
        },
        lookalikes={
            "pos-id": "is off between parts of the text only, a table at every distance",
            "weight-missing": "a layer with other weights is off in the first row of all, a table is not",
            "ctx-limit": "states match the replay at every length",
            "attn-mask": "a window leaves the rows before it alike",
        },
        unseen={
            "partial rotary ignored": "the gate tries it, but no draft here was trained with a part of the head to plant it on",
            "tables of unknown theta": "thetas other than the usual ones, the target's and the draft's are not tried",
        },
        reports=("SpecForge issue #265", "speculators PR #574", "vllm-ascend issue #6612", "NeMo Automodel PR #2399"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = from_trials(m, self.id, {"": "config rope_parameters"}, _FIXES)
        for suspicion in found:
            suspicion.caveats.append("short requests show little of it: expect more at long context")
        other = None if m.checkpoint is None else m.checkpoint.theta
        return found if other is None or found else [_trained_with(other, m.consumer)]

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "another rotary table would put every state off, more with the distance to the prompt")

    def make(self, plant: Plant, variant: str) -> Plant:
        own = {"rope_type": "default", "rope_theta": plant.theta}
        far, near = (1e6 if plant.theta < 1e5 else 1e4), (1e6 if plant.theta == 5e5 else 5e5)
        theta = far if variant.endswith(_FAR) else near
        if variant in (_FAR, _NEAR):
            return reads_otherwise(plant, rope_parameters={**own, "rope_theta": theta})
        if variant in _SCALED:
            return reads_otherwise(plant, rope_parameters={**own, **_SCALED[variant]})
        if variant == _DROPPED:
            scaling = {"rope_type": "linear", "factor": 1.25}
            configured = (("rope_parameters", {**own, **scaling}), ("rope_scaling", scaling))
            return reads_otherwise(replace(plant, config=(*plant.config, *configured)), rope_parameters=own)
        if variant in self.variants:
            wrong = {**own, "rope_theta": theta}
            return replace(plant, config=(*plant.config, ("rope_parameters", wrong), ("rope_theta", theta)))
        raise ValueError(f"rope has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        settings = {name: value for name, value in plant.engine.settings.items() if name != "rope_parameters"}
        return replace(plant, engine=replace(plant.engine, settings=settings))


def _trained_with(other: OtherTheta, consumer: str | None) -> Suspicion:
    """The configuration names another base than the draft was trained with."""
    low, high = other.interval
    right = {**other.parameters, "rope_theta": other.theta}
    return told(
        Rope.id, ["config rope_theta"],
        f"the draft was trained with a rope theta of {other.theta:g}; its configuration says {other.configured:g}", "supported",
        hypothesis="config.json names another rotary base than the trainer used",
        prediction="on its training states the draft does best with the base that it was trained with",
        measurement="-log p of the token to match on training states, with the configured base and others, paired by sequence",
        result=f"{other.own:.3f} with {other.configured:g}, {other.gain:+.3f} [{low:+.3f}, {high:+.3f}] with {other.theta:g}",
        decides="rope if another base in common use is better beyond chance; engine and replay agree here",
        fix=f"Set rope_theta to {other.theta:g} in config.json (in `rope_parameters` too, where it is there).",
        recovery="replayed", undo=Undo(switches={"rope_parameters": right}),
        patch=Patch(config={"rope_theta": other.theta, "rope_parameters.rope_theta": other.theta}),
        config=plain_keys(consumer, {"rope_theta": other.theta, "rope_parameters": right}),
        figures={"configured": other.configured, "theta": other.theta, "own": other.own, "gain": other.gain},
        caveats=["short texts show little of it: expect more at long context"],
    )
