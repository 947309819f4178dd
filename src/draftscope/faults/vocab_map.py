"""vocab-map: draft ids become the wrong target ids: the map is missing, dropped, zero, or read as absolute ids."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.checking import engine_map, in_file, other_map, short_vocabulary, told
from draftscope.faults.measurements import MapFacts, Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Patch

AGREE, DISAGREE = 0.95, 0.6

_FIX = Fix(
    says="`d2t` holds offsets: target id = i + d2t[i], int64, one per draft id. Ship it in the checkpoint, and check that the "
    "engine loads it (vLLM renames it to draft_id_to_target_id, SGLang builds hot_token_id from it)."
)


_CAPTURED = "--draft, --serve (with draft_states), --target"
_DEAD = "the drafted ids are the checkpoint's choices under another map; in draft ids the draft is right"
PAGE = Page(
    symptom="Accept length near 1 while every training metric, taken in draft ids, is good.",
    traces={
        "engine drops it": Trace(says="the loader does not recognise the map's name: draft id i is token i", input=_CAPTURED,
                                 shows=_DEAD, rung="measured"),
        "engine reads it as absolute": Trace(says="the engine takes d2t[i] for the token", input=_CAPTURED, shows=_DEAD,
                                             rung="measured"),
        "engine: off by one": Trace(says="the engine counts the padding token in one vocabulary only", input=_CAPTURED,
                                    shows=_DEAD + ": always one beside", rung="measured"),
        "engine: a map of other data": Trace(says="a map cached by another run or model is loaded", input=_CAPTURED, shows=_DEAD,
                                             rung="measured"),
        "missing in the checkpoint": Trace(says="the exporter left d2t and t2d out", input="--draft", rung="served",
                                           shows="fewer draft ids than tokens, and no map"),
        "stored as absolute": Trace(says="the exporter wrote token ids where offsets belong", input="--draft", rung="as read",
                                    shows="the d2t[i], and not the i + d2t[i], are the true entries of t2d"),
        "zero in the checkpoint": Trace(says="a buffer was exported before it was filled", input="--draft", rung="as read",
                                        shows="every entry is 0, and t2d says otherwise"),
        "off by one in the checkpoint": Trace(says="every entry is one too high, t2d is not", input="--draft", rung="as read",
                                              shows="i + d2t[i] are not the true entries of t2d"),
        "off by one, without t2d": Trace(says="every entry is one too high, and nothing else names the ids",
                                         input="--draft, --train, --target", rung="trained",
                                         shows="on training states the draft is right with every entry one lower"),
        "of other data in the checkpoint": Trace(
            says="d2t and t2d were made from other data than the head was trained with", input="--draft, --train, --target",
            rung="trained", shows="on training states each draft id stands for one token, and not for the map's"),
        "first ids": Trace(says="the vocabulary was cut to the first ids", input="--draft, --train", rung="trained",
                           shows="the ids are 0, 1, 2 and on, and cover far less of the answers than the most frequent would"),
        "too long": Trace(says="the map has an entry more than the head has rows", input="--draft", rung="none",
                          shows="the shapes of d2t and of the head contradict each other"),
        "too short": Trace(says="the map has an entry less than the head has rows", input="--draft", rung="none",
                           shows="the shapes of d2t and of the head contradict each other"),
    },
    lookalikes={
        "weight-missing": "with other weights no map makes a draft id stand for one token; a head in another order has the map's "
                          "own ids",
        "train-budget": "a draft that learned nothing is not helped by any map",
        "tied-head": "the drafts are those of embedding rows, not of the head's under another map",
    },
    unseen={"a map of another revision of the tokenizer that differs in rare ids alone": "ids that do not occur are not learned"},
    reports=("vllm PR #18909", "NeMo Automodel PR #2447", "verl-SpeCo PR #66", "vllm-ascend PR #15863"),
)


class VocabMap(Fault):
    """Training metrics stay good, since they are taken in draft ids; in target ids nearly nothing matches."""

    id = "vocab-map"
    title = "draft ids mapped to the wrong tokens"
    verdict = "wiring"
    variants = (
        "engine drops it", "engine reads it as absolute", "engine: off by one", "engine: a map of other data",
        "missing in the checkpoint", "stored as absolute", "zero in the checkpoint", "off by one in the checkpoint",
        "off by one, without t2d", "of other data in the checkpoint", "first ids", "too long", "too short",
    )
    page = PAGE

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return (self._in_checkpoint(m) or self._by_training(m) or self._short(m)) or self._in_engine(m)

    def _by_training(self, m: Measurements) -> list[Suspicion]:
        """In draft ids the draft is right, in tokens it is not: its own training states tell."""
        facts = m.checkpoint
        if facts is None:
            return []
        found, learned = facts.otherwise, facts.learned.get("trained")
        if found is not None and found.key.startswith("altered map "):
            by = int(found.key.rpartition(" ")[2])
            return [in_file(
                self.id, found, ["tensor d2t"], f"every entry of the map is {'one too high' if by < 0 else 'one too low'}",
                _FIX.says, undo=Undo(altered=(found.key.removeprefix("altered "),)),
                patch=Patch(tensors={"d2t": f"subtract {-by}"}))]
        if learned is None or not other_map(learned) or (learned.inside > 0.95 and learned.shift is None):
            return []
        return [told(
            self.id, ["tensor d2t"], "the map in the checkpoint is not the one that the draft was trained with: its draft ids "
            "stand for other tokens", "proven", hypothesis="the map was made from other data, or for another tokenizer",
            prediction="the draft's choice, mapped, is the token that comes, as often as any map would have it",
            measurement="on training states, a map from draft ids to tokens learned from one half and tried on the other",
            result=f"{learned.stored:.1%} of {learned.rows} rows right as stored, {learned.learned:.1%} with the learned map "
                   f"(always the same token: {learned.common:.1%}); {learned.inside:.1%} of its tokens are ids of the stored map",
            decides="vocab-map if one consistent map of other ids does far better; with other weights none does",
            figures={"stored": learned.stored, "learned": learned.learned, "common": learned.common, "inside": learned.inside,
                     "rows": learned.rows},
            fix=f"{_FIX.says} Take it from the trainer's own vocabulary file, not from a cache of another run.",
            recovery="bounded", undo=Undo(ids=learned.ids), patch=Patch(tensors={"d2t": "from source", "t2d": "from source"}),
            caveats=["the learned map knows only the ids that occurred: the figure is a lower bound"],
        )]

    def _short(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not short_vocabulary(m) or facts.covered is None or facts.coverable is None:
            return []
        return [told(
            self.id, ["tensor d2t"], f"the draft's vocabulary is the first ids of the tokenizer: {facts.covered:.0%} of the "
            "training answers' tokens are in it", "proven", hypothesis="the vocabulary was cut without counting the data",
            prediction="a vocabulary of the most frequent tokens covers nearly all of the text",
            measurement="ids of the map; the training answers' tokens inside it, and inside the best vocabulary of its size",
            result=f"{facts.covered:.1%} covered, {facts.coverable:.1%} by the most frequent ids",
            decides="vocab-map if the ids are simply the first ones and cover far less",
            figures={"covered": facts.covered, "coverable": facts.coverable},
            fix="Count the tokens of the training answers, take the most frequent ones, and train again.",
            recovery="needs-retraining",
        )]

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
                fix=_fix(facts),
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
                return self._by_engine(m)
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

    def _by_engine(self, m: Measurements) -> list[Suspicion]:
        """What the engine drafted is a function of the checkpoint's own choices, and not the map's."""
        learned = None if m.checkpoint is None else m.checkpoint.learned.get("engine")
        if learned is None or not engine_map(learned):
            return []
        moved = learned.shift is not None
        return [told(
            self.id, ["tensor d2t"], f"the engine's tokens are all {learned.shift:+d} beside the map's" if moved
            else "the engine runs the draft with another map than the checkpoint's", "proven",
            hypothesis="the engine maps draft ids to tokens in another way than the checkpoint means",
            prediction="the drafted tokens are head(norm(recorded draft state)) mapped by i + d2t[i]",
            measurement="argmax of the checkpoint's head over the recorded draft states against the recorded drafts: a map "
                        "learned from one half and tried on the other",
            result=f"{learned.stored:.1%} of {learned.rows} drafts are the map's, {learned.learned:.1%} the learned map's "
                   f"(always the same token: {learned.common:.1%})",
            decides="vocab-map if each draft id always became one token; weight-missing if not",
            figures={"stored": learned.stored, "learned": learned.learned, "common": learned.common, "shift": learned.shift},
            fix=_FIX.says, recovery="replayed", undo=Undo(), runtime=True,
        )]

    def why_not(self, m: Measurements) -> str:
        facts = m.vocabulary
        if facts is None:
            return "give the draft (--draft): its map was not looked at"
        agreement = None if m.stages is None else m.stages.head_agreement.get("offset")
        drafted = "" if agreement is None else f"; {agreement:.1%} of the engine's drafts are its choices mapped so"
        return f"{facts.why}{drafted}"

    def make(self, plant: Plant, variant: str) -> Plant:
        done = {"zero in the checkpoint": ("map zero",), "off by one in the checkpoint": ("map 1",),
                "off by one, without t2d": ("map 1", "map without t2d"), "of other data in the checkpoint": ("map other",),
                "first ids": ("head of first ids", "map first"), "too long": ("map longer",), "too short": ("map shorter",)}
        if variant in done:
            return replace(plant, export=done[variant], refused=variant.startswith("too "))
        if variant.startswith("engine: "):
            how = "map 1" if variant == "engine: off by one" else "map other"
            return replace(plant, engine=replace(plant.engine, altered=(how,)))
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
            engine=replace(plant.engine, d2t="offset", altered=()),
            export=(),
            refused=False,
            drop=tuple(d for d in plant.drop if d != "d2t"),
            stored_map="offset",
        )


def _fix(facts: MapFacts) -> Fix:
    says, how = _FIX.says, "from source"
    if facts.stored == "absolute":
        how = "from absolute ids"
    elif facts.rebuilt:
        says, how = says + " It can be rebuilt here from t2d: the i-th true entry minus i.", "from t2d"
    return Fix(says=says, patch=Patch(tensors={"d2t": how} if how != "from source" else {"d2t": how, "t2d": how}))
