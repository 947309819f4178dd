"""weight-missing: a tensor that the draft needs is absent from the checkpoint, or was never loaded."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo
from draftscope.faults.measurements import CLEARLY, OTHER, SAME, Measurements, StageFacts
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

CHANCE = 0.6
_ASKED_BY = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm", "midlayer.self_attn.q_norm.": "the q/k norms",
             "midlayer.self_attn.k_norm.": "the q/k norms"}

_PARTS = {"fc.": "fc", "midlayer.": "the decoder layer", "lm_head.": "lm_head"}


class WeightMissing(Fault):
    """Loaders of these classes check neither for missing nor, mostly, for unknown names: the tensor keeps its initial value."""

    id = "weight-missing"
    title = "a tensor left at its initial value"
    verdict = "wiring"
    variants = ("engine: lm_head", "engine: fc", "engine: layer", "checkpoint: lm_head", "checkpoint: fc", "checkpoint: layer",
                "checkpoint: embedding")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._in_checkpoint(m) or self._wrong_embedding(m) or self._in_engine(m)

    def _wrong_embedding(self, m: Measurements) -> list[Suspicion]:
        """An embedding beside the draft that is neither the target's nor the one it was trained with."""
        facts = m.embedding
        if facts is None or facts.own is None or facts.target is None or facts.own - facts.target < CLEARLY:
            return []
        return [Suspicion(
            fault=self.id, side="serve", where=["tensor embed_tokens.weight"],
            says="the checkpoint's own embedding is not the one that the draft was trained with: the target's serves it better",
            strength="proven",
            evidence=[Evidence(
                hypothesis="the embedding stored beside the draft is of another model or tokenizer, or was never trained",
                prediction="a draft accepts most with the embedding it was trained with",
                measurement=f"the draft replayed with its own embedding and with the target's ({facts.rung}), and their rows "
                            "compared",
                result=f"-log p {facts.own:.2f} and accept length {facts.own_length or 0:.2f} with its own, {facts.target:.2f} "
                       f"and {facts.target_length or 0:.2f} with the target's; {facts.same_rows:.0%} of the rows are equal",
                decides="weight-missing if the target's embedding does better",
                figures={"own": facts.own, "target": facts.target, "same_rows": facts.same_rows},
            )],
            fix=Fix(says="Remove embed_tokens.weight from the checkpoint, so that engines use the target's, or export the "
                         "embedding that the draft was trained with."),
            recovery="replayed", undo=Undo(target_embedding=True),
        )]

    def _in_checkpoint(self, m: Measurements) -> list[Suspicion]:
        lost = [name for name in m.missing if name not in ("d2t", "t2d")]
        if not lost:
            return []
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=[f"tensor {name}" for name in lost],
                says=f"the checkpoint lacks {', '.join(lost)}: engines leave them at their initial value and say nothing",
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="a needed tensor is not in the file",
                        prediction="every tensor that the configuration calls for is there",
                        measurement="names in the checkpoint against those that its configuration calls for",
                        result=f"missing: {', '.join(lost)}",
                        decides="weight-missing if a name is absent",
                        figures={"missing": lost},
                    )
                ],
                fix=Fix(
                    says="Export the checkpoint again with these tensors (look for a prefix or a rename that the loader does not "
                    "know)."
                ),
                recovery="needs-serving",
                caveats=[
                    "what it costs cannot be replayed without the tensors",
                    *(f"it is the configuration's {switch} that asks for {prefix}*: if the draft was trained without, the "
                      "switch is what is wrong"
                      for prefix, switch in _ASKED_BY.items() if any(n.startswith(prefix) for n in lost)),
                ],
            )
        ]

    def _in_engine(self, m: Measurements) -> list[Suspicion]:
        stages = m.stages
        stage = None if stages is None else departing_stage(stages)
        if stage is None or stages is None or any(gate.passed for gate in m.gate_with.values()):
            return []
        agreement = ", ".join(f"{share:.1%} under {name}" for name, share in stages.head_agreement.items())
        figures = {"fc_error": stages.fc_error, "layer_error": stages.layer_error, "head_agreement": stages.head_agreement}
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
                strength="proven" if stage in ("fc", "head") else "supported",
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
                fix=Fix(
                    says="Compare the engine's loaded parameters with the checkpoint by name: a prefix (`model.`, "
                    "`draft_model.`), `midlayer` against `layers.0`, or a tied flag makes loaders skip tensors without a word."
                ),
                recovery="replayed",
                undo=Undo(),
                runtime=True,
                caveats=[]
                if stage in ("fc", "head")
                else [
                    "a stale draft cache, other positions or rotary tables, or a switch that the engine does not know look "
                    "the same"
                ],
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        place, _, part = variant.partition(": ")
        if variant == "checkpoint: embedding":
            return replace(plant, embedding="of other tokens")
        prefix = {"lm_head": "lm_head.", "fc": "fc.", "layer": "midlayer."}.get(part)
        if prefix is None or place not in ("engine", "checkpoint"):
            raise ValueError(f"weight-missing has no variant {variant!r}")
        if place == "engine":
            return replace(plant, engine=replace(plant.engine, lost=(*plant.engine.lost, prefix)))
        return replace(plant, drop=(*plant.drop, prefix))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, lost=()), drop=tuple(d for d in plant.drop if d == "d2t"),
                       embedding="")


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
