"""vocab-map: draft ids become the wrong target ids: the map is missing, dropped, zero, or read as absolute ids."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

AGREE, DISAGREE = 0.95, 0.6

_FIX = Fix(
    says="`d2t` holds offsets: target id = i + d2t[i], int64, one per draft id. Ship it in the checkpoint, and check that the "
    "engine loads it (vLLM renames it to draft_id_to_target_id, SGLang builds hot_token_id from it)."
)


class VocabMap(Fault):
    """Training metrics stay good, since they are taken in draft ids; in target ids nearly nothing matches."""

    id = "vocab-map"
    title = "draft ids mapped to the wrong tokens"
    verdict = "wiring"
    variants = ("engine drops it", "engine reads it as absolute", "missing in the checkpoint", "stored as absolute")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._in_checkpoint(m) or self._in_engine(m)

    def _in_checkpoint(self, m: Measurements) -> list[Suspicion]:
        facts = m.vocabulary
        if facts is None or facts.stored in ("offset", "none needed"):
            return []
        absolute = facts.stored == "absolute"
        undo = Undo(d2t="absolute") if absolute else Undo(d2t="rebuilt") if facts.rebuilt else None
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=["tensor d2t"],
                says={
                    "missing": f"the checkpoint has {facts.draft_vocab} draft ids for {facts.vocab} tokens and no map: engines "
                    "take draft id i for token i",
                    "zero": f"the map is all zero although {facts.draft_vocab} draft ids stand for {facts.vocab} tokens: draft "
                    "id i becomes token i",
                    "contradicts": "the map d2t and the mask t2d of the checkpoint contradict each other, whichever way d2t is "
                    "read",
                    "absolute": "the map was written as absolute token ids where every stack adds it to the draft id",
                }[facts.stored],
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="the vocabulary map is not what the draft was trained with",
                        prediction="d2t is an offset for each draft id, and i + d2t[i] are the true entries of t2d",
                        measurement="d2t read from the checkpoint, its range and its agreement with t2d",
                        result=facts.why,
                        decides="vocab-map if the map is missing, zero, or agrees with t2d only as absolute ids",
                        figures={"draft_vocab": facts.draft_vocab, "vocab": facts.vocab, "stored": facts.stored},
                    )
                ],
                fix=_FIX
                if not facts.rebuilt
                else _FIX.model_copy(
                    update={"says": _FIX.says + " It can be rebuilt here from t2d: the i-th true entry minus i."}
                ),
                recovery="replayed" if undo else "bounded",
                undo=undo,
                caveats=self._caveats(m, undo),
            )
        ]

    def _caveats(self, m: Measurements, undo: Undo | None) -> list[str]:
        caveats = [] if undo else ["without d2t or t2d the map cannot be rebuilt: take it from the trainer's vocabulary file"]
        if m.stages is not None and m.stages.head_agreement.get("rebuilt", 0.0) > AGREE:
            caveats.append(
                f"the engine drafted with the true map ({m.stages.head_agreement['rebuilt']:.1%} of its drafts agree): the "
                "checkpoint given here is not the one that it served"
            )
        return caveats

    def _in_engine(self, m: Measurements) -> list[Suspicion]:
        agreement = {} if m.stages is None else m.stages.head_agreement
        if agreement:
            if agreement.get("offset", 1.0) > DISAGREE:
                return []
            name, share = max(agreement.items(), key=lambda item: item[1])
            if share < AGREE or name == "offset":
                return []
        else:
            passed = [key for key, found in m.gate_with.items() if key.startswith("d2t=") and found.passed]
            if not passed or m.gate is None or m.gate.passed:
                return []
            name = passed[0].partition("=")[2]
        gate = m.gate_with.get(f"d2t={name}")
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=["tensor d2t"],
                says="the engine drops the vocabulary map: draft id i becomes token i"
                if name == "zero"
                else "the engine reads the vocabulary map as absolute token ids",
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="the engine maps draft ids to tokens in another way than the checkpoint means",
                        prediction="the drafted tokens are head(norm(recorded draft state)) mapped by i + d2t[i]",
                        measurement="argmax of the checkpoint's head over the recorded draft states, mapped in each way, against "
                        "the recorded drafts",
                        result=", ".join(f"{key}: {value:.1%} equal" for key, value in agreement.items())
                        + (
                            f"; with d2t={name} the replay gives the recorded counts in {gate.share:.1%} of {gate.steps} steps"
                            if gate
                            else ""
                        ),
                        decides="vocab-map if another reading of the map explains the drafts; weight-missing if none does",
                        figures={"agreement": agreement, "gate": None if gate is None else gate.share},
                    )
                ],
                fix=_FIX,
                recovery="replayed",
                undo=Undo(d2t="offset"),
                runtime=True,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "engine drops it":
            return replace(plant, engine=replace(plant.engine, d2t="zero"))
        if variant == "engine reads it as absolute":
            return replace(plant, engine=replace(plant.engine, d2t="absolute"))
        if variant == "missing in the checkpoint":
            return replace(plant, drop=(*plant.drop, "d2t"))
        if variant == "stored as absolute":
            return replace(plant, stored_map="absolute")
        raise ValueError(f"vocab-map has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(
            plant,
            engine=replace(plant.engine, d2t="offset"),
            drop=tuple(d for d in plant.drop if d != "d2t"),
            stored_map="offset",
        )
