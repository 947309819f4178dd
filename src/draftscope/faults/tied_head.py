"""tied-head: the tie of head and embedding is taken for granted where there is none, or missed where there is."""

from __future__ import annotations

from dataclasses import replace

from draftscope.consumers import consumer
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.checking import cut_from_target, in_engine, told
from draftscope.faults.fixes import plain_keys
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Patch

_UNTIE = "Set tie_word_embeddings to false in the draft's config.json: the draft has a head of its own."
_PATCH = Patch(config={"tie_word_embeddings": False})


class TiedHead(Fault):
    """`tie_word_embeddings` copied from the target: an engine then throws the trained head away and takes embedding rows."""

    id = "tied-head"
    title = "a head tied to the embedding that is not"
    verdict = "wiring"
    variants = ("engine ties a reduced head", "checkpoint: tie flag on a reduced head", "checkpoint: the embedding as head")
    page = Page(
        symptom="Accept length 1.0, or resuming ends in a shape error, with a checkpoint whose training looked fine.",
        traces={
            "engine ties a reduced head": Trace(
                says="config.json says tie_word_embeddings, and the engine takes rows of the embedding for the head",
                input="--draft, --serve (with draft_states), --target", rung="as read",
                shows="the flag stands beside an lm_head of the draft's own size, and the drafted ids are the argmax under "
                      "embedding rows"),
            "checkpoint: tie flag on a reduced head": Trace(
                says="the flag was copied from the target; this engine does not look at it", input="--draft", rung="none",
                shows="config.json ties the head to the embedding, and the file has a head of another number of rows"),
            "checkpoint: the embedding as head": Trace(
                says="the exporter obeyed the flag and wrote embedding rows where the trained head was",
                input="--draft, --train, --target", rung="trained",
                shows="the head's rows are the target's at the draft's ids, the flag is set, and the draft fails on its training "
                      "states"),
        },
        lookalikes={
            "weight-missing": "without the flag a head of the target's rows is the engine's sharing or the exporter's mistake",
            "vocab-map": "with another map the drafted ids are a function of the checkpoint's own choices",
            "train-budget": "a head that was hardly trained has rows of its own",
        },
        unseen={"a tied target whose tie the trainer ignores": "the teacher's head was random: the draft learned noise, and the "
                "files look as after too little training; `the target's head over its last states` in the trainer tells"},
        reports=("SpecForge issue #139", "SpecForge PR #140"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._in_engine(m) or self._exported(m) or self._flag(m)

    def _in_engine(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not facts.tied:
            return []
        found = []
        for one in facts.explains("altered head "):
            # Of a tied target head and embedding are one: that the other explains it as well says nothing.
            alone = replace(one, next_best=None)
            suspicion = in_engine(self.id, alone, ["config tie_word_embeddings", "tensor lm_head.weight"],
                                  "the engine takes the embedding for the draft's head: config.json says that they are tied",
                                  _UNTIE)
            suspicion.fix.patch = _PATCH
            found.append(suspicion)
        return found

    def _exported(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not facts.tied or not cut_from_target(m):
            return []
        first = m.rungs["trained"].joint[0]
        return [told(
            self.id, ["tensor lm_head.weight", "config tie_word_embeddings"],
            "the head in the checkpoint is rows of the embedding, not the one that was trained", "supported",
            hypothesis="the exporter obeyed a tie that the training did not have",
            prediction="a draft does well with the head it was trained with",
            measurement="rows of lm_head against the target's at the draft's ids; the draft on its training states",
            result=f"{facts.head_rows['offset']:.0%} of the rows are the target's; first-position acceptance {first:.0%}",
            decides="tied-head if the rows are the embedding's, the flag is set and the draft fails",
            figures={"rows": facts.head_rows["offset"], "position_1": first},
            fix=f"Export the trained head again. {_UNTIE}", recovery="needs-retraining",
            patch=Patch(config={"tie_word_embeddings": False}, tensors={"lm_head.weight": "from source"}),
        )]

    def _flag(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not facts.tied or not facts.own_head or facts.whole:
            return []
        known = None if m.consumer is None else consumer(m.consumer)[0]
        honours = known is not None and bool(known.tied_head)
        if known is not None and not honours:
            return []  # who reads it does not look at the flag
        return [told(
            self.id, ["config tie_word_embeddings"],
            "config.json ties the head to the embedding, and the file has a head of the draft's own size"
            + (f": {m.consumer} then takes the embedding and throws the trained head away" if honours else ""),
            "proven" if honours else "supported",
            hypothesis="tie_word_embeddings was copied from the target's configuration",
            prediction="a reduced head has rows of its own and is not tied", measurement="tie_word_embeddings against lm_head",
            result="tie_word_embeddings is true; lm_head.weight is there, with the rows of the draft's vocabulary alone",
            decides="tied-head if the flag contradicts the head", fix=_UNTIE, recovery="needs-serving", patch=_PATCH,
            config=plain_keys(m.consumer, {"tie_word_embeddings": False}),
            caveats=[] if honours else ["vLLM does not look at the flag for these drafts; SGLang does"],
        )]

    def why_not(self, m: Measurements) -> str:
        if m.checkpoint is None:
            return "give the draft (--draft): its configuration and head were not looked at"
        return "tie_word_embeddings is not set" if not m.checkpoint.tied else "the head names every token, as the embedding does"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"tied-head has no variant {variant!r}")
        plant = replace(plant, config=(*plant.config, ("tie_word_embeddings", True)))
        if variant == "engine ties a reduced head":
            return replace(plant, engine=replace(plant.engine, altered=("head embedding",)))
        return replace(plant, export=("head target rows",)) if variant == "checkpoint: the embedding as head" else plant

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        config = tuple(pair for pair in plant.config if pair[0] != "tie_word_embeddings")
        return replace(plant, config=config, export=(), engine=replace(plant.engine, altered=()))


