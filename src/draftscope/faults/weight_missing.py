"""weight-missing: a tensor that the draft needs is absent, untrained or another one: in the file, or in the engine."""

from __future__ import annotations

from dataclasses import replace

from draftscope.eagle3.config import DraftConfig
from draftscope.faults.base import Fault, Suspicion, Undo
from draftscope.faults.checking import cut_from_target, engine_map, in_engine, in_file, told, untrained
from draftscope.faults.measurements import CLEARLY, OTHER, SAME, TURNED, Measurements, StageFacts
from draftscope.faults.plant import Plant
from draftscope.faults.weight_missing_page import PAGE
from draftscope.findings import Evidence, Fix, Patch
from draftscope.target.model import Target
from draftscope.text import reached

CHANCE = 0.6
_ASKED_BY = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm", "midlayer.self_attn.q_norm.": "the q/k norms",
             "midlayer.self_attn.k_norm.": "the q/k norms"}
_PREFIX = {"lm_head": "lm_head.", "fc": "fc.", "layer": "midlayer.", "q_proj": "midlayer.self_attn.q_proj.",
           "gain of hidden_norm": "midlayer.hidden_norm.", "gain of the final norm": "norm."}
_MLP, _ATTENTION = "midlayer.mlp.", "midlayer.self_attn."
_ALTERED = {
    "gate and up swapped": f"swap {_MLP}gate_proj.weight {_MLP}up_proj.weight",
    "k and v swapped": f"swap {_ATTENTION}k_proj.weight {_ATTENTION}v_proj.weight",
    "o transposed": f"transpose {_ATTENTION}o_proj.weight",
    "gain of post_attention_layernorm": "ones midlayer.post_attention_layernorm.weight",
    "the target's head": "head target rows",
    "head rows in another order": "head permuted",
}
_RENAME = ("Compare the engine's loaded parameters with the checkpoint by name: a prefix (`model.`, `draft_model.`), `midlayer` "
           "against `layers.0`, or a tied flag makes loaders skip tensors without a word.")


class WeightMissing(Fault):
    """Loaders of these classes check neither for missing nor, mostly, for unknown names: the tensor keeps its initial value."""

    id = "weight-missing"
    title = "a tensor left at its initial value, or another one in its place"
    verdict = "wiring"
    variants = (
        "engine: lm_head", "engine: fc", "engine: layer", "engine: q_proj", "engine: gain of hidden_norm",
        "engine: gain of the final norm", "engine: the target's head", "engine: gate and up swapped", "engine: o transposed",
        "engine: the target's embedding",
        "checkpoint: lm_head", "checkpoint: fc", "checkpoint: layer", "checkpoint: q_proj", "checkpoint: embedding",
        "checkpoint: gate and up swapped", "checkpoint: k and v swapped", "checkpoint: o transposed",
        "checkpoint: gain of post_attention_layernorm", "checkpoint: the target's head", "checkpoint: head rows in another order",
        "checkpoint: step 0", "checkpoint: an early one", "checkpoint: mask token outside the table",
    )
    page = PAGE

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = self._in_checkpoint(m) + self._untrained(m) + self._mask_token(m)
        found = found or self._source(m) or self._wrong_embedding(m) or self._otherwise(m) or self._head(m) or self._gains(m)
        return found or self._explained(m) or self._in_engine(m)

    def beyond(self, variant: str, target: Target, draft: DraftConfig) -> str:
        square = draft.num_attention_heads * draft.head_dim == draft.hidden_size
        return "its o_proj is not square: turned, no loader takes it" if "transposed" in variant and not square else ""

    def why_not(self, m: Measurements) -> str:
        facts, stages = m.checkpoint, m.stages
        if facts is None:
            return "give the draft (--draft): its tensors were not looked at"
        said = f"every tensor is there, {facts.norms - len(facts.ones)} of {facts.norms} norms are trained"
        if stages is None or stages.layer_error is None:
            return f"{said}; record fc_output and draft_states to hold the engine's weights against them"
        fc = "" if stages.fc_error is None else f"fc by {stages.fc_error:.2g}, "
        return f"{said}; the engine's stages depart by no more than {fc}the layer by {stages.layer_error:.2g}"

    # -- the file ----------------------------------------------------------------------------------------------------------

    def _in_checkpoint(self, m: Measurements) -> list[Suspicion]:
        lost = [name for name in m.missing if name not in ("d2t", "t2d")]
        if not lost:
            return []
        return [told(
            self.id, [f"tensor {name}" for name in lost],
            f"the checkpoint lacks {', '.join(lost)}: engines leave them at their initial value and say nothing", "proven",
            hypothesis="a needed tensor is not in the file", prediction="every tensor that the configuration calls for is there",
            measurement="names in the checkpoint against those that its configuration calls for",
            result=f"missing: {', '.join(lost)}", decides="weight-missing if a name is absent", figures={"missing": lost},
            fix="Export the checkpoint again with these tensors (look for a prefix or a rename that the loader does not know).",
            recovery="needs-serving", patch=Patch(tensors=dict.fromkeys(lost, "from source")),
            caveats=["what it costs cannot be replayed without the tensors",
                     *(f"it is the configuration's {switch} that asks for {prefix}*: if the draft was trained without, the "
                       "switch is what is wrong"
                       for prefix, switch in _ASKED_BY.items() if any(n.startswith(prefix) for n in lost))],
        )]

    def _untrained(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not untrained(m):
            return []
        return [told(
            self.id, ["tensor *"], "the checkpoint was never trained: all its norms are exactly 1 and its matrices as an "
            "initialiser leaves them", "proven" if not facts.matrices - len(facts.drawn) else "supported",
            hypothesis="the state before the first step was exported, or the trained tensors were never filled in",
            prediction="training moves norms off 1, and rows and columns of matrices apart in size",
            measurement="every value of every norm; spread, kurtosis, and how norms of rows and columns scatter",
            result=f"{len(facts.ones)} of {facts.norms} norms are exactly 1, {len(facts.drawn)} of {facts.matrices} matrices "
                   "look freshly drawn",
            decides="weight-missing if all of them look so; train-budget moves at least the matrices",
            figures={"ones": len(facts.ones), "norms": facts.norms, "drawn": len(facts.drawn), "matrices": facts.matrices},
            fix="Export again from the trainer's last state, and look for missing keys in its log: a wrapper's prefix or a "
                "sharded state that was never gathered leaves a freshly made module.",
            recovery="needs-retraining",
            caveats=["a training that never moved a weight (learning rate 0, frozen parameters) leaves the same file"],
        )]

    def _mask_token(self, m: Measurements) -> list[Suspicion]:
        if m.checkpoint is None or m.checkpoint.mask_token is None:
            return []
        token, rows = m.checkpoint.mask_token
        return [told(
            self.id, ["config mask_token_id"], f"the mask token is {token}, and the embedding has {rows} rows: no engine has a "
            "row for it", "proven", hypothesis="the embedding was widened for training and not exported so",
            prediction="the mask token is a row of the embedding that the draft runs with",
            measurement="mask_token_id against the rows of the embedding", result=f"{token} of {rows}",
            decides="weight-missing if it lies outside", figures={"mask_token": token, "rows": rows},
            fix="Export the widened embedding with the draft, or train with a token that the target has.",
            recovery="needs-retraining",
        )]

    def _source(self, m: Measurements) -> list[Suspicion]:
        """The source does better on the training states: what was exported or converted is not it."""
        apart = None if m.checkpoint is None else m.checkpoint.apart
        if m.checkpoint is None or apart is None or not (apart.differing or apart.absent):
            return []
        changed = [name for name in apart.differing if name not in ("d2t", "t2d") and name not in m.checkpoint.grids]
        if not (changed or apart.absent):
            return []
        better = apart.own is not None and apart.source is not None and apart.own - apart.source > 0.02
        every = len(changed) >= 0.8 * apart.tensors
        names = ", ".join([*changed, *apart.absent][:4]) + (" and others" if len(changed) + len(apart.absent) > 4 else "")
        cost = f"; -log p on training states {apart.own:.2f} here, {apart.source:.2f} with the source" \
            if apart.own is not None and apart.source is not None else ""
        return [told(
            self.id, [f"tensor {name}" for name in [*changed, *apart.absent][:8]],
            ("nearly every tensor is another than the source's: another state of the training was exported" if every
             else f"{names} are not what the source holds"), "proven" if better else "supported",
            hypothesis="what was exported is not what was trained", prediction="a conversion leaves every tensor as it was",
            measurement="the checkpoint against its source, tensor by tensor; both replayed on the training states",
            result=f"{len(changed)} of {apart.tensors} tensors differ, by up to "
                   f"{max(apart.differing.values(), default=0.0):.2g}; {len(apart.absent)} are absent{cost}",
            decides="weight-missing if tensors differ and the source does better",
            figures={"differing": dict(list(apart.differing.items())[:32]), "absent": list(apart.absent), "own": apart.own,
                     "source": apart.source},
            fix="Serve the source, or export it again and compare tensor by tensor.", recovery="bounded",
            patch=Patch(tensors=dict.fromkeys([*changed, *apart.absent], "from source")),
        )]

    def _wrong_embedding(self, m: Measurements) -> list[Suspicion]:
        """An embedding beside the draft that is neither the target's nor the one it was trained with."""
        facts = m.embedding
        if facts is None or facts.own is None or facts.target is None or facts.own - facts.target < CLEARLY:
            return []
        if facts.turned is not None and facts.turned < TURNED:
            return []  # the right one in another basis: rotated-space
        return [told(
            self.id, ["tensor embed_tokens.weight"],
            "the checkpoint's own embedding is not the one that the draft was trained with: the target's serves it better",
            "proven",
            hypothesis="the embedding stored beside the draft is of another model or tokenizer, or was never trained",
            prediction="a draft accepts most with the embedding it was trained with",
            measurement=f"the draft replayed with its own embedding and with the target's ({facts.rung}); their rows compared",
            result=f"{reached(facts.own, facts.own_length)} with its own, {reached(facts.target, facts.target_length)} with the "
                   f"target's; {facts.same_rows:.0%} of the rows are equal",
            decides="weight-missing if the target's embedding does better",
            figures={"own": facts.own, "target": facts.target, "same_rows": facts.same_rows},
            fix="Remove embed_tokens.weight from the checkpoint, so that engines use the target's, or export the embedding that "
                "the draft was trained with.",
            recovery="replayed", undo=Undo(target_embedding=True), patch=Patch(tensors={"embed_tokens.weight": "remove"}),
        )]

    def _otherwise(self, m: Measurements) -> list[Suspicion]:
        found = None if m.checkpoint is None else m.checkpoint.otherwise
        if found is None or not found.key.startswith(("altered swap ", "altered transpose ")):
            return []
        names = found.key.split()[2:]
        how = f"swapped with {names[1]}" if len(names) > 1 else "the wrong way round"
        patch = Patch(tensors={names[0]: f"swap with {names[1]}"} if len(names) > 1 else {names[0]: "transpose"})
        return [in_file(
            self.id, found, [f"tensor {name}" for name in names], f"{names[0]} is {how} in the checkpoint",
            "Put the tensors right in the checkpoint, and look at the exporter's renaming: it does so to every draft.",
            undo=Undo(altered=(found.key.removeprefix("altered "),)), patch=patch,
        )]

    def _head(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None:
            return []
        learned = facts.learned.get("trained")
        if learned is not None and learned.learned - max(learned.stored, learned.common) > 0.2 and learned.inside > 0.95 \
                and learned.shift is None and learned.stored < learned.learned / 2:
            return [told(
                self.id, ["tensor lm_head.weight", "tensor d2t"],
                "the head's rows stand in another order than the map: the draft's choices are right for other draft ids",
                "proven", hypothesis="head and map were written in different orders",
                prediction="the draft's choice, mapped, is the token that comes, as often as under any map of the same ids",
                measurement="on training states, a map from draft ids to tokens learned from one half and tried on the other",
                result=f"{learned.stored:.1%} of {learned.rows} rows right as stored, {learned.learned:.1%} with the learned "
                       f"map; {learned.inside:.1%} of its tokens are ids of the stored map",
                decides="weight-missing if the same ids in another order do; vocab-map if other ids do",
                figures={"stored": learned.stored, "learned": learned.learned, "inside": learned.inside, "rows": learned.rows},
                fix="Write head and map from one list of ids: row i of lm_head belongs to target id i + d2t[i] (engines take "
                    "the map as it is; trainers that select with t2d need ascending ids).",
                recovery="bounded", undo=Undo(ids=learned.ids),
                caveats=["the learned map knows only the ids that occurred: the figure is a lower bound"],
            )]
        if facts.tied or not cut_from_target(m):
            return []
        return [told(
            self.id, ["tensor lm_head.weight"], "the head in the checkpoint is the target's own, and the draft does badly with "
            "it", "supported", hypothesis="the target's head was exported in place of the one that was trained",
            prediction="a draft that was trained with the target's head does well with it",
            measurement="rows of lm_head against the target's rows at the draft's ids; the draft on its training states",
            result=f"{facts.head_rows['offset']:.0%} of the rows are the target's; first-position acceptance on training states "
                   f"{(m.in_sample or m.rungs['trained']).joint[0]:.0%}",
            decides="weight-missing if the rows are the target's and the draft fails with them",
            figures={"rows": facts.head_rows["offset"], "position_1": (m.in_sample or m.rungs["trained"]).joint[0]},
            fix="Export the head that was trained (SpecForge and vLLM share the target's only where the draft has none).",
            recovery="needs-retraining", patch=Patch(tensors={"lm_head.weight": "from source"}),
            caveats=["a draft trained with the target's head frozen, and too little, looks the same: the trainer's log tells"],
        )]

    def _gains(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not facts.ones or 2 * len(facts.ones) > facts.norms:
            return []
        return [told(
            self.id, [f"tensor {name}" for name in facts.ones[:8]], f"{', '.join(facts.ones[:4])} holds nothing but ones, as "
            "before any training; the other norms do not", "supported",
            hypothesis="the norm's gain was not loaded before the export", prediction="training moves every norm off 1",
            measurement="every value of every norm", result=f"{len(facts.ones)} of {facts.norms} norms are exactly 1",
            decides="weight-missing if one is and its neighbours are not", figures={"ones": list(facts.ones), "of": facts.norms},
            fix="Export again from the trainer's state, and look for these names in its log of missing keys.",
            recovery="needs-retraining", patch=Patch(tensors=dict.fromkeys(facts.ones, "from source")),
            caveats=["bfloat16 weights without a master copy move in steps of 1/256 near 1: a short training may not reach one",
                     "what it costs cannot be replayed without the trained gain"],
        )]

    # -- the engine --------------------------------------------------------------------------------------------------------

    def _explained(self, m: Measurements) -> list[Suspicion]:
        """Another tensor than the checkpoint's that gives exactly what the engine gave."""
        found = []
        for one in [] if m.checkpoint is None else m.checkpoint.engine:
            kind, _, rest = one.key.partition(" ")
            what, _, names = rest.partition(" ")
            if one.key == "lost embed_tokens.":
                found.append(in_engine(
                    self.id, one, ["tensor embed_tokens.weight"], "the engine puts the target's embedding in place of the "
                    "draft's own", "Serve with a consumer that keeps a draft's own embedding (vLLM since PR #28549; SGLang never "
                    "does), or train with the target's."))
            elif kind == "lost":
                found.append(in_engine(self.id, one, [f"tensor {rest}"], f"the engine runs with {rest} at its initial value, 1",
                                       _RENAME))
            elif kind == "altered" and what in ("swap", "transpose"):
                how = "in each other's place" if what == "swap" else "the wrong way round"
                found.append(in_engine(self.id, one, [f"tensor {name}" for name in names.split()],
                                       f"the engine has {' and '.join(names.split())} {how}",
                                       "Look at the stacked loading of the engine (gate and up, q, k and v as one matrix): its "
                                       "order of shards is not the checkpoint's."))
            elif kind == "altered" and what == "head" and not m.checkpoint.tied:  # type: ignore[union-attr]
                found.append(in_engine(
                    self.id, one, ["tensor lm_head.weight"], "the engine runs the draft with the target's head in place of the "
                    "draft's own", "Serve with a release that keeps a draft's own head (vLLM since PR #28549), and check that "
                    "lm_head.weight arrives under the name that it looks for."))
        return found

    def _in_engine(self, m: Measurements) -> list[Suspicion]:
        stages = m.stages
        stage = None if stages is None else departing_stage(stages)
        if stage is None or stages is None or any(gate.passed for gate in m.gate_with.values()):
            return []
        learned = None if m.checkpoint is None else m.checkpoint.learned.get("engine")
        if stage == "head" and learned is not None and engine_map(learned):
            return []
        if m.checkpoint is not None and m.checkpoint.engine:
            return []
        agreement = ", ".join(f"{share:.1%} under {name}" for name, share in stages.head_agreement.items())
        figures = {"fc_error": stages.fc_error, "layer_error": stages.layer_error, "head_agreement": stages.head_agreement}
        # Drafts drawn far above the request's temperature are as seldom the head's best as those of another head.
        drawn = stage == "head" and m.sampler is not None and m.sampler.drawn_otherwise
        sure = stage in ("fc", "head") and not drawn
        where = {
            "fc": ["tensor fc.weight"],
            "layer": ["tensor midlayer"],
            "head": ["tensor lm_head.weight"],
            "fc or layer": ["tensor fc.weight", "tensor midlayer"],
        }[stage]
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=where,
                says={
                    "fc": "the engine's fc is not the checkpoint's: its output for the recorded input is another",
                    "layer": "the engine's decoder layer is not the checkpoint's: fc agrees, the layer's output does not",
                    "fc or layer": "the engine's fc or decoder layer is not the checkpoint's (the capture holds no fc output to "
                    "tell which)",
                    "head": "the engine's lm_head is not the checkpoint's: the layer's output agrees, the drafted ids do not, "
                    "under any map",
                }[stage],
                # Stale caches, positions, rotary tables and unread switches change the layer's output as other weights do.
                strength="proven" if sure else "suspected" if drawn else "supported",
                evidence=[
                    Evidence(
                        hypothesis="the engine runs the draft with other weights than the checkpoint's",
                        prediction="each stage, run offline on what the engine recorded before it, gives what the engine "
                        "recorded after it",
                        measurement="fc over the recorded input; the layer over the recorded rows; head and map over the "
                        "recorded draft states",
                        result=f"fc error {_figure(stages.fc_error)}, layer error {_figure(stages.layer_error)}, drafts equal: "
                        f"{agreement or 'not recorded'}",
                        decides="the first stage that departs is the one with other weights",
                        figures=figures,
                    )
                ],
                fix=Fix(says=_RENAME),
                recovery="replayed",
                undo=Undo(),
                runtime=True,
                caveats=[] if sure else ["drafts drawn at another temperature than the request's look the same"] if drawn else [
                    "a stale draft cache, other positions or rotary tables, or a switch that the engine does not know look "
                    "the same"
                ],
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        place, _, part = variant.partition(": ")
        if variant not in self.variants:
            raise ValueError(f"weight-missing has no variant {variant!r}")
        if part == "embedding":
            return replace(plant, embedding="of other tokens")
        if part == "the target's embedding":
            return replace(plant, embedding="trained", engine=replace(plant.engine, lost=(*plant.engine.lost, "embed_tokens.")))
        if part == "step 0":
            return replace(plant, state="step 0")
        if part == "an early one":
            return replace(plant, state="early", source=True)
        if part == "mask token outside the table":
            return replace(plant, config=(*plant.config, ("mask_token_id", 999_999)))
        if place == "engine":
            engine = plant.engine
            if part == "the target's head":
                return replace(plant, engine=replace(engine, altered=("head target first",)))
            if part in _ALTERED:
                return replace(plant, engine=replace(engine, altered=(_ALTERED[part],)))
            return replace(plant, engine=replace(engine, lost=(*engine.lost, _PREFIX[part])))
        if part in _ALTERED:
            return replace(plant, export=(*plant.export, _ALTERED[part]), source=part == "the target's head")
        return replace(plant, drop=(*plant.drop, _PREFIX[part]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        if plant.state == "early":
            return None
        return replace(plant, engine=replace(plant.engine, lost=(), altered=()), drop=tuple(d for d in plant.drop if d == "d2t"),
                       embedding="" if plant.embedding == "of other tokens" else plant.embedding, export=(), state="trained",
                       config=())


def departing_stage(stages: StageFacts) -> str | None:
    """The first stage of the draft that the checkpoint does not reproduce: fc, layer, `fc or layer`, head; None if all do."""
    if stages.fc_error is not None and stages.fc_error > OTHER:
        explained = stages.fc_error_reference is not None and stages.fc_error_reference < SAME
        return None if explained else "fc"
    if stages.layer_error is not None and stages.layer_error > OTHER:
        return "layer" if stages.fc_error is not None and stages.fc_error < SAME else "fc or layer"
    if (
        stages.layer_error is not None
        and stages.layer_error < SAME
        and stages.head_agreement
        and max(stages.head_agreement.values()) < CHANCE
    ):
        return "head"
    return None


def _figure(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.2g}"
