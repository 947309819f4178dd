"""capture-alias: a slot was handed out as a reference to a buffer that was overwritten before it was read."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.facts_rows import OTHER_PLACE
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.req_mix import fresh
from draftscope.faults.rowcause import figures, of_cause, one_buffer, phases, told
from draftscope.findings import Evidence, Fix
from draftscope.target.rows import Later, On
from draftscope.target.spoiling import Spoiler

_SPOILERS: dict[str, Spoiler] = {
    "all slots one buffer": Later(last=True),
    "a later state in some rows": Later(race=3),
    "the last state in some verify rows": On(Later(last=True, race=2), phase="verify"),
}


class CaptureAlias(Fault):
    """A view in place of a copy: an addition in place, or a second thread, changes it before the draft or the writer reads it."""

    id = "capture-alias"
    title = "a buffer changed before it was read"
    verdict = "wiring"
    variants = ("all slots one buffer", "a later state in some rows", "the last state in some verify rows",
                "train all slots one buffer", "train a later state in some rows")
    page = Page(
        symptom="two captures of the same prompts differ, or all slots hold one state; acceptance changes from run to run",
        traces={
            "all slots one buffer": Trace(
                says="the engine hands out the residual buffer itself for every slot, and goes on adding to it",
                input="--serve, --target", shows="all slots hold one state, bit for bit: a later boundary's", rung="served"),
            **{name: Trace(
                says="a slot's buffer is changed in place while it is being read", input="--serve, --target",
                shows="rows of the right boundary and rows of a later one alternate within a request", rung="served",
            ) for name in ("a later state in some rows", "the last state in some verify rows")},
            **{f"train {name}": Trace(
                says="the data writer's hook keeps a reference in place of a copy", input="--train, --target",
                shows="the same in the training files", rung="trained",
            ) for name in ("all slots one buffer", "a later state in some rows")},
        },
        lookalikes={
            "layer-offset": "it is the same for every row and in every run",
            "layer-set": "it is the same for every row of a phase; a slot doubled by its ids leaves the others as they are",
            "req-mix": "its rows are of other tokens",
            "parallel-shard": "ranks with other ids make whole sequences wrong, not rows of one",
            "residual-missing": "a state short of its residual holds less than it should, never a later point",
        },
        unseen={
            "one slot that holds a later state in every row":
                "that is what wrong layer ids give, too: two captures of the same prompts that differ prove the buffer "
                "(`draftscope capture verify`)",
        },
        reports=("SpecForge report 'e2e dataflow vs main', finding 2",),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side, _, rows in of_cause(m, "capture-alias"):
            serve = side.name == "serve"
            count = max(r.kinds.get(OTHER_PLACE, 0) for r in rows)
            found.append(Suspicion(
                fault=self.id, side=side.name, where=[side.where(r.slot) for r in rows],
                says=f"{of_side(side.name)} hold a later state than the slot's own in {count} rows ({len(rows)} slots), the "
                     "right one in others of the same sequence" + (phases(rows, OTHER_PLACE) if serve else ""),
                strength="proven",
                evidence=[Evidence(
                    hypothesis="a slot's buffer was changed before it was read",
                    prediction="rows of a later boundary stand between right ones; layer ids are the same for every row",
                    measurement="each row against every place of its own token",
                    result=told(side, rows) + "; places: " + "; ".join(
                        f"{side.where(r.slot)} {', '.join(f'{n} rows {place}' for place, n in r.places.items())}" for r in rows),
                    decides="capture-alias if right rows and later ones alternate within a sequence",
                    figures=figures(side, rows) | {"sequences": max(r.beside for r in rows)},
                )],
                fix=Fix(says=_FIX + ("" if serve else " Write the training data again, then retrain.")),
                recovery="replayed" if serve else "needs-retraining",
                undo=Undo(reference=frozenset(r.slot for r in rows)) if serve else None,
            ))
        return found + self._one_buffer(m)

    def _one_buffer(self, m: Measurements) -> list[Suspicion]:
        found = []
        wanted = [want.boundary for want in m.reference or ()]
        for side in m.sides():
            facts = m.rows.get(side.name)
            if facts is None or len(facts.identical) < max(2, m.shapes.get(side.name, 0)):
                continue
            placed = side.proof == "sweep"
            if placed and not one_buffer(facts, wanted):
                continue
            serve = side.name == "serve"
            held = f" (boundary {facts.places[0]})" if placed else ""
            found.append(Suspicion(
                fault=self.id, side=side.name, where=[side.where(slot) for slot in facts.identical],
                says=f"all slots of {of_side(side.name)} hold one and the same state, bit for bit{held}",
                strength="supported" if placed else "suspected",
                evidence=[Evidence(
                    hypothesis="the slots share one buffer, and hold what stood in it last",
                    prediction="slots of unlike boundaries are unlike",
                    measurement="slots against each other, bit for bit" + (", and against every boundary" if placed else ""),
                    result=f"{len(facts.identical)} slots are equal in nine rows of ten or more{held}; wanted "
                           f"{', '.join('unknown' if b is None else str(b) for b in wanted)}",
                    decides="capture-alias if the state shared is a later one than the slots should hold; one layer id given "
                            "several times looks the same",
                    figures={"identical": list(facts.identical), "places": list(facts.places)},
                )],
                fix=Fix(says=_FIX + ("" if serve else " Write the training data again, then retrain.")),
                recovery="replayed" if serve and placed else "bounded" if serve else "needs-retraining",
                undo=Undo(reference=frozenset(facts.identical)) if serve and placed else None,
                caveats=["the same layer id given for every slot looks the same where an engine allows it"],
            ))
        return found

    def why_not(self, m: Measurements) -> str:
        looked = [f"{side.name}: {len(facts.identical) or 'no'} slots are equal bit for bit, and no slot alternates "
                  "between its own boundary and a later one"
                  for side in m.sides() if (facts := m.rows.get(side.name)) is not None]
        return "; ".join(looked) or "no states were given (--train, --serve)"

    def make(self, plant: Plant, variant: str) -> Plant:
        name = variant.removeprefix("train ")
        if variant not in self.variants:
            raise ValueError(f"capture-alias has no variant {variant!r}")
        side = "train" if variant.startswith("train") else "serve"
        wiring = replace(getattr(plant, side), spoilers=(fresh(_SPOILERS[name]),))
        return replace(plant, **{side: wiring})

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, spoilers=()))


_FIX = "Copy each state where it arises (clone, not a view), before the next layer adds to its buffer or a thread reuses it."
