"""layer-set: the slots hold other boundaries than the draft was trained on, and not by one common step of one."""

from __future__ import annotations

from dataclasses import replace

from draftscope.boundaries import Boundary, default_boundaries
from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.fixes import capture_boundaries
from draftscope.faults.layers import Moved, evidence, moved, name
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.slots import beside, names
from draftscope.faults.unpaired import unpaired
from draftscope.target.wiring import Wiring

INPUTS = "--train, --serve, --target"
PHASED = INPUTS + " (a capture that says which rows are verify steps')"


class LayerSet(Fault):
    """Default ids in place of configured ones, a state put in front, an order changed, a slot doubled or lost."""

    id = "layer-set"
    title = "slots hold other layers"
    verdict = "wiring"
    variants = ("embedding in front", "permuted", "duplicated", "collapsed", "defaults of another depth", "first layers",
                "last slot elsewhere", "verify rows", "prefill rows", "train permuted", "train embedding in front")
    page = Page(
        symptom="Accept length far below training from the first position on, in every request; the server is healthy.",
        traces={
            "embedding in front": Trace(
                "The engine puts the embedding into the list of captured states, so that every slot moves up and the last drops "
                "out; labels of the training file may claim the same.", INPUTS,
                "Slot 0 equals the embedding row of its token, the others hold their neighbour's boundary.", "served"),
            "permuted": Trace("The engine concatenates the captured states in another order (a set, a sorted list).", INPUTS,
                              "All wanted boundaries are there, in other slots.", "served"),
            "duplicated": Trace("One id is captured twice and another not at all.", INPUTS,
                                "Two slots hold one boundary.", "served"),
            "collapsed": Trace("Ids computed for a shallow target fall together, and one state fills every slot.", INPUTS,
                               "All slots hold one boundary.", "served"),
            "defaults of another depth": Trace(
                "The engine ignores the draft's ids and takes the default triple, computed from another depth (a vision tower's, "
                "a pipeline stage's).", INPUTS, "Slots are displaced by unlike amounts.", "served"),
            "first layers": Trace("The first entries of the list of hidden states are taken, embedding included.", INPUTS,
                                  "Slots hold boundaries 0, 1, 2.", "served"),
            "last slot elsewhere": Trace("One id is wrong by more than one.", INPUTS, "One slot is displaced, by two.", "served"),
            "verify rows": Trace("CUDA graphs of verify steps were captured before the draft's ids were set: they deliver the "
                                 "default layers, prefill runs without graphs and delivers the right ones.", PHASED,
                                 "Only rows of verify steps hold other boundaries.", "served"),
            "prefill rows": Trace("Prefill takes the default layers, decoding the configured ones.", PHASED,
                                  "Only the prompt's rows hold other boundaries.", "served"),
            "train permuted": Trace("The writer of the training data puts the slots in another order.",
                                    "--train, --serve, --draft, --target",
                                    "The training files contradict configuration and capture, and the draft does better on what "
                                    "is served.", "trained"),
            "train embedding in front": Trace("The writer of the training data stores the embedding first.",
                                              "--train, --serve, --draft, --target", "As before.", "trained"),
        },
        lookalikes={
            "layer-offset": "every slot that moved is displaced by the same one boundary",
            "graph-capture": "zeros, padding or rows of an earlier batch, where this is a real state of the same token from "
            "another layer",
            "residual-missing": "a branch or partial sum fits, no whole stream does",
            "schema-width": "a slot too few or too many; here the number is right",
        },
        unseen={"a dropped slot": "it changes the width of what is recorded, which schema-width names",
                "ids that lead to equal boundaries": "what holds the same states cannot be told apart, and costs nothing"},
        reports=("vLLM PR #42764", "NeMo Automodel PR #2256", "sglang PR #38642", "llama.cpp issue #24541",
                 "SafeAILab/EAGLE issue #239", "sglang PR #22836"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._placed(m) or unpaired(self.id, m)

    def _placed(self, m: Measurements) -> list[Suspicion]:
        return [self._suspicion(m, found) for found in moved(m) if not found.is_offset]

    def _suspicion(self, m: Measurements, found: Moved) -> Suspicion:
        side = found.side
        order = _order(m, found) if found.phase is None else ()
        undo = Undo(order=order) if order and side.name == "serve" else found.undo()
        advice = _advice(m, found)
        if found.phase is not None:
            advice = (f"Only the path that makes the rows{found.rows} is wrong: set the layer ids before its CUDA graphs are "
                      "captured, and see that both paths read the same ids. " + advice)
        return Suspicion(
            fault=self.id,
            side=side.name,
            where=names(side, found.slots),
            says=f"{of_side(side.name)}{found.rows} are {_pattern(m, found)}",
            strength="proven" if side.proof != "none" else "suspected",
            evidence=evidence(
                m, found, "layer-set if the displacement differs between slots; layer-offset if it is one common step of one"
            ),
            fix=capture_boundaries(side.name, m, advice),
            recovery="replayed" if undo else "needs-retraining",
            undo=undo,
        )

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if side.slots and m.reference is not None:
                held = ", ".join(f"{side.where(s.slot)} at {s.got.boundary} (wanted {s.want.boundary})"
                                 for s in beside(side, m.reference))
                return f"every placed slot holds what it should, or is displaced by one common step: {held}"
        return "no slot was placed: give training states, a capture and the target (--train, --serve, --target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        low, middle, high = plant.serve.slots
        shallower = tuple(Boundary(b) for b in default_boundaries(high.index + 1))
        if variant == "verify rows":
            return replace(plant, serve=replace(plant.serve, verify=shallower))
        if variant == "prefill rows":
            return replace(plant, serve=replace(plant.serve, slots=shallower, verify=(low, middle, high)))
        made = {
            "embedding in front": (Boundary(0), low, middle),
            "permuted": (middle, high, low),
            "duplicated": (low, low, high),
            "collapsed": (low, low, low),
            "defaults of another depth": shallower,
            "first layers": (Boundary(0), Boundary(1), Boundary(2)),
            "last slot elsewhere": (low, middle, Boundary(high.index + 2)),
        }
        name = variant.removeprefix("train ")
        if name not in made or (name != variant and variant not in self.variants):
            raise ValueError(f"layer-set has no variant {variant!r}")
        if name != variant:
            return replace(plant, train=replace(plant.train, slots=made[name]))
        return replace(plant, serve=replace(plant.serve, slots=made[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots, verify=()))


def _held(m: Measurements, found: Moved) -> tuple[list[int | None], list[int | None]]:
    return [p.boundary for p in found.held], [p.boundary for p in m.reference or ()]


def _order(m: Measurements, found: Moved) -> tuple[int, ...]:
    """How to put recorded slots back, where all that is wanted was recorded in another slot."""
    held, wanted = _held(m, found)
    if None in held or sorted(map(str, held)) != sorted(map(str, wanted)) or len(set(held)) < len(held):
        return ()
    return tuple(held.index(b) for b in wanted)


def _pattern(m: Measurements, found: Moved) -> str:
    held, wanted = _held(m, found)
    text = (
        "["
        + ", ".join(name(p) for p in found.held)
        + f"] where {m.wanted_by} ["
        + ", ".join(name(p) for p in m.reference or ())
        + "]"
    )
    if _order(m, found):
        return f"{text}: the right states in another order"
    if held[0] == 0 and wanted[0] != 0 and held[1:] == wanted[:-1]:
        return f"{text}: the embedding was put in front, everything moved up one slot, and the last state dropped out"
    if len(set(held)) < len(held) and None not in held:
        return f"{text}: one state is there twice, another is missing"
    return text


def _advice(m: Measurements, found: Moved) -> str:
    held, wanted = _held(m, found)
    if held[0] == 0 and wanted[0] != 0:
        seen = m.train is not None and (m.train.proof == "sweep" or bool(m.train.embedding))
        return "Do not capture the embedding" + (
            ": the training data does not hold it, whatever its labels say." if seen else ", unless the draft was trained on it."
        )
    return f"Capture the layers that {m.wanted_by}, in that order."
