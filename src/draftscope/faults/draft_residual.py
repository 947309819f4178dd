"""residual-missing inside the draft: the engine's draft layer loses its own residual stream.

Engines pass a pair (branch, residual) from layer to layer: a placeholder norm, or a name used twice, drops the second.
"""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Suspicion, Trace, Undo
from draftscope.faults.checking import in_engine
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant

_INPUT = "--draft, --serve (with fc_output and draft_states), --target"
_SAYS = {
    "branch": "the engine hands out what the draft's last layer adds, without the stream that it is added to",
    "entry": "the engine's draft loses the stream that its first layer was given: only what the layer adds goes on",
}
READINGS = {"the draft's branch alone": "branch", "the draft's first input lost": "entry"}
"""How `DraftConfig.residual` has the draft run, by variant."""
TRACES = {
    "the draft's branch alone": Trace(
        "The engine's draft returns the output of its last feed-forward block and not the sum with the stream (a placeholder in "
        "place of the norm that adds the two).", _INPUT,
        "The recorded draft states are those of the checkpoint's layer with `residual=branch`, to rounding; with the sum they "
        "are far off.", "measured"),
    "the draft's first input lost": Trace(
        "The engine overwrites the residual of the first layer before it is added.", _INPUT,
        "The recorded draft states are those of the checkpoint's layer with `residual=entry`, to rounding.", "measured"),
}


def recognise(fault: str, m: Measurements) -> list[Suspicion]:
    """Residuals that the engine's draft loses, told from its recorded states."""
    return [
        in_engine(fault, one, ["tensor midlayer"], _SAYS[one.key.partition("=")[2]],
                  "Mend the engine's draft layer: the sum of branch and residual has to reach the final norm and the next layer.",
                  undo=Undo(settings=True))
        for one in ([] if m.checkpoint is None else m.checkpoint.explains("residual="))
    ]


def why_not(m: Measurements) -> str:
    """What was measured of the draft's own layer."""
    error = None if m.stages is None else m.stages.layer_error
    if error is None:
        return "the draft's own layer was not held against recorded draft states (--serve with fc_output and draft_states)"
    return f"the recorded draft states are the checkpoint's layer over what was recorded before it, within {error:.2g}"


def make(plant: Plant, variant: str) -> Plant:
    """The set-up with the engine's draft losing it."""
    settings = {**plant.engine.settings, "residual": READINGS[variant]}
    return replace(plant, engine=replace(plant.engine, settings=settings))


def mend(plant: Plant) -> Plant:
    """The set-up with the draft's sum whole again."""
    settings = {key: value for key, value in plant.engine.settings.items() if key != "residual"}
    return replace(plant, engine=replace(plant.engine, settings=settings))
