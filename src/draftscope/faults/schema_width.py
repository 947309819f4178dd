"""schema-width: a file holds another number of slots, or another width, than the draft takes."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion
from draftscope.faults.checking import eagle_mode
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix


class SchemaWidth(Fault):
    """Producer and consumer disagree about the shape of what is handed over: one slot too few, or samples of several shapes."""

    id = "schema-width"
    title = "another number of slots"
    verdict = "wiring"
    variants = ("train: a slot too few",)

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._slots(m) + self._mixed(m)

    def _slots(self, m: Measurements) -> list[Suspicion]:
        takes = m.shapes.get("draft")
        found = []
        for side in m.sides():
            given = m.shapes.get(side.name)
            if takes is None or given is None or given == takes or (side.name == "serve" and eagle_mode(m)):
                continue
            where = "train:tensor hidden_states" if side.name == "train" else "tensor fc_input"
            result = f"{given} slots in {side.name}, {takes} in the draft's fc"
            found.append(
                _suspicion(
                    self.id,
                    side.name == "train",
                    where,
                    f"the {_of(side.name)} hold {given} slots, the draft takes {takes}",
                    result,
                )
            )
        return found

    def _mixed(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side in m.sides():
            others = m.other_shapes.get(side.name, {})
            if not others:
                continue
            where = "train:tensor hidden_states" if side.name == "train" else "tensor fc_input"
            counts = ", ".join(f"{count} of {shape}" for shape, count in sorted(others.items()))
            says = f"the {_of(side.name)} are of several shapes: besides those of the first, {counts} (slots x width)"
            found.append(_suspicion(self.id, side.name == "train", where, says, f"left out: {counts}"))
        return found

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant != "train: a slot too few":
            raise ValueError(f"schema-width has no variant {variant!r}")
        return replace(plant, train=replace(plant.train, slots=plant.train.slots[:-1]))


def _of(side: str) -> str:
    return "training states" if side == "train" else "served states"


def _suspicion(fault: str, train: bool, where: str, says: str, result: str) -> Suspicion:
    return Suspicion(
        fault=fault,
        side="train" if train else "serve",
        where=[where],
        says=says,
        strength="proven",
        evidence=[
            Evidence(
                hypothesis="producer and consumer disagree about the shape",
                prediction="every sequence holds as many slots, as wide, as the draft's fc takes",
                measurement="shapes in the files against the shape of fc",
                result=result,
                decides="schema-width if they differ",
            )
        ],
        fix=Fix(
            says="Configure as many layers to capture as the draft's fc takes, and look for ids that coincide or that the engine "
            "cannot reach." + (" Write the training data again, then retrain." if train else "")
        ),
        recovery="needs-retraining" if train else "needs-serving",
    )
