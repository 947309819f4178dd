"""schema-width: a file holds another number of slots, another width or another order of axes than the draft takes."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.checking import eagle_mode
from draftscope.faults.measurements import Measurements, SideFacts, SideName
from draftscope.faults.plant import Plant
from draftscope.faults.rowcause import INTERLEAVED
from draftscope.findings import Evidence, Fix
from draftscope.target.rows import Interleaved

_TRAIN = {
    "train: one slot for three": "one slot", "train: axes swapped": "axes swapped", "train: channels before slots": "interleaved",
    "train: another width": "another width", "train: twice the width": "twice the width", "train: two widths": "two widths",
}
_SERVE = {"one slot for three": "one slot", "a slot too few": "a slot too few", "twice the width": "twice the width",
          "another width": "another width"}
_SAYS = {
    "train: a slot too few": ("the trainer is given one slot less than the draft's fc takes", "slots in the files against fc"),
    "train: one slot for three": ("one state is stored for three", "slots in the files against fc"),
    "train: axes swapped": ("states are stored as [entries, tokens, width]",
                            "the second axis is as long as the tokens, the first is not"),
    "train: channels before slots": ("states are stored as [tokens, width, entries] and read as [tokens, entries, width]",
                                     "nothing places until the axes are put right; then every slot does"),
    "train: another width": ("rows are cut or of another model", "width of the files against fc and target"),
    "train: twice the width": ("a state is stored twice, or heads times head size in place of the width",
                               "the same, by a factor"),
    "train: two widths": ("files of two producers lie together", "widths of the files against each other"),
    "one slot for three": ("three slots are sent through a buffer for one", "slots in the capture against fc"),
    "a slot too few": ("one layer id cannot be reached, and its state is left out", "slots in the capture against fc"),
    "twice the width": ("heads times head size in place of the width", "twice as many slots, or as wide, as fc takes"),
    "another width": ("rows are cut", "width of the capture against fc and target"),
    "channels before slots": ("slots are stacked on the last axis and flattened", "nothing places until the axes are put right"),
}


class SchemaWidth(Fault):
    """Producer and consumer disagree about the shape of what is handed over: slots, width, axes, or samples of several shapes."""

    id = "schema-width"
    title = "another number of slots, width or order of axes"
    verdict = "wiring"
    variants = ("train: a slot too few", *_TRAIN, "channels before slots", *_SERVE)
    page = Page(
        symptom="a shape error, a truncation that makes it go away, or a draft that accepts next to nothing",
        traces={variant: Trace(
            says=says, input="--train, --draft" if variant.startswith("train") else "--serve, --draft", shows=shows,
            rung="none" if "channels" not in variant else "trained" if variant.startswith("train") else "served",
        ) for variant, (says, shows) in _SAYS.items()},
        lookalikes={
            "layer-set": "as many slots as fc takes, of the right width, but of other layers",
            "parallel-shard": "the width is right and blocks of channels are not",
            "req-mix": "fewer rows than tokens on the first axis, and none as long as the tokens",
        },
        unseen={"a crash in fc": "the engine's own message shows it before anything can be captured"},
        reports=("sglang PR #10547", "llama.cpp PR #24707", "tpu-inference PR #2841"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._slots(m) + self._mixed(m) + self._widths(m) + self._turned(m) + self._interleaved(m)

    def _slots(self, m: Measurements) -> list[Suspicion]:
        takes = m.shapes.get("draft")
        found = []
        for side in m.sides():
            given = m.shapes.get(side.name)
            if takes is None or given is None or given == takes or (side.name == "serve" and eagle_mode(m)):
                continue
            factor = f", {given // takes} times as many" if given % takes == 0 else ""
            if side.proof == "sweep":
                factor += "; they are boundaries " + ", ".join("?" if p.boundary is None else str(p.boundary) for p in side.slots)
            found.append(_suspicion(
                side.name, f"the {_of(side.name)} hold {given} slots, the draft takes {takes}{factor}",
                f"{given} slots in {side.name}, {takes} in the draft's fc",
            ))
        return found

    def _mixed(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side in m.sides():
            others = m.other_shapes.get(side.name, {})
            if others:
                counts = ", ".join(f"{count} of {shape}" for shape, count in sorted(others.items()))
                found.append(_suspicion(
                    side.name, f"the {_of(side.name)} are of several shapes: besides those of the first, {counts} (slots x "
                    "width)", f"left out: {counts}"))
        return found

    def _widths(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side, facts in m.rows.items():
            if facts.width is not None:
                own, meant = facts.width
                factor = f", {own // meant} times as wide" if own % meant == 0 else ""
                found.append(_suspicion(
                    side, f"the {_of(side)} are {own} wide, the draft takes slots {meant} wide{factor}",
                    f"{own} channels a slot in {side}, {meant} in the draft or target",
                    caveat="states of another target are of another width, too: then the files do not go with this draft"))
        return found

    def _turned(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side, facts in m.rows.items():
            counted = facts.counted
            if counted is not None and counted.turned:
                name, rows, tokens = counted.files[0]
                found.append(_suspicion(
                    side, f"the {_of(side)} have their first two axes swapped: [entries, tokens, width] in {counted.turned} of "
                    f"{counted.of} files", f"{name}: first axis {rows}, second axis as long as its {tokens} tokens"))
        return found

    def _interleaved(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side in m.sides():
            facts = m.rows.get(side.name)
            if facts is None or facts.interleaved is None or facts.interleaved >= INTERLEAVED:
                continue
            suspicion = _suspicion(
                side.name, f"the {_of(side.name)} have channels before slots: written as [width, slots], read as [slots, width]",
                f"median relative error of the slots with the axes put right: {facts.interleaved:.2g}; as they stand, nothing "
                "places them")
            suspicion.where = [side.where(slot) for slot in range(len(side.slots))]
            suspicion.fix = Fix(says="Concatenate slots on the channel axis; do not stack them behind it and flatten."
                                     + (" Write the training data again, then retrain." if side.name == "train" else ""))
            if side.name == "serve":
                suspicion.recovery, suspicion.undo = "replayed", Undo(reference=_all(side))
            found.append(suspicion)
        return found

    def why_not(self, m: Measurements) -> str:
        shapes = ", ".join(f"{slots} slots in {name}" for name, slots in m.shapes.items())
        return shapes or "no file with slots was given (--train, --serve, --draft)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "train: a slot too few":
            return replace(plant, train=replace(plant.train, slots=plant.train.slots[:-1]))
        if variant == "channels before slots":
            return replace(plant, serve=replace(plant.serve, spoilers=(Interleaved(),)))
        if variant in _TRAIN:
            return replace(plant, rewritten=replace(plant.rewritten, train=_TRAIN[variant]))
        if variant in _SERVE:
            return replace(plant, rewritten=replace(plant.rewritten, serve=_SERVE[variant]))
        raise ValueError(f"schema-width has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, spoilers=()), rewritten=replace(plant.rewritten, serve=""))


def _all(side: SideFacts) -> frozenset[int]:
    return frozenset(range(len(side.slots)))


def _of(side: str) -> str:
    return "training states" if side == "train" else "served states"


def _suspicion(side: SideName, says: str, result: str, caveat: str = "") -> Suspicion:
    train = side == "train"
    return Suspicion(
        fault="schema-width",
        side=side,
        where=["train:tensor hidden_states" if train else "tensor fc_input"],
        says=says,
        strength="proven",
        evidence=[
            Evidence(
                hypothesis="producer and consumer disagree about the shape",
                prediction="every sequence holds as many slots, as wide, as the draft's fc takes, in that order of axes",
                measurement="shapes in the files against the shape of fc, and slots placed as they stand and with axes put right",
                result=result,
                decides="schema-width if they differ",
            )
        ],
        fix=Fix(
            says="Configure as many layers to capture as the draft's fc takes, hand all of their channels over, and look for ids "
            "that coincide or that the engine cannot reach." + (" Write the training data again, then retrain." if train else "")
        ),
        recovery="needs-retraining" if train else "needs-serving",
        caveats=[caveat] if caveat else [],
    )
