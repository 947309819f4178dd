"""lossmask-empty: samples without one supervised token."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_data import MaskFacts
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import LossMask, Plant
from draftscope.findings import Evidence, Fix

SHARE = 0.05
MOST = 0.8


class LossmaskEmpty(Fault):
    """The assistant marker was never found in the text, or samples were cut before the first answer token."""

    id = "lossmask-empty"
    title = "nothing supervised"
    verdict = "data"
    variants = ("all", "many", "cut before the first answer", "no generation markers")
    page = Page(
        symptom="loss and accuracy of exactly 0.00 in part of the steps, or a draft that learns nothing while the loss is 0",
        traces={
            "all": Trace("the data writer looks for an assistant marker that its text does not have", "--train, --target",
                         "every mask sums to 0 though the tokens hold answers", "none"),
            "many": Trace("the marker is missing from part of the data (another source, preformatted text)", "--train, --target",
                          "part of the masks sum to 0, and their tokens hold answers", "none"),
            "cut before the first answer": Trace(
                "the data writer cuts samples at a length that long prompts fill", "--train, --target",
                "empty masks on samples of one length, the longest, whose tokens hold no answer", "none"),
            "no generation markers": Trace(
                "the masks come from the template's generation markers and the template has none", "--train, --target",
                "every mask sums to 0, and the target's template marks no answer", "none"),
        },
        lookalikes={
            "train-budget": "gives a high loss, near ln of the draft vocabulary; here the loss is 0 where nothing is supervised",
            "lossmask-span": "masks that are not empty but elsewhere",
        },
        unseen={"masks made by the trainer while it runs": "the files hold none; hand over its log: steps of loss exactly 0"},
        reports=("SpecForge issue #392", "marin issue #7237"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side = m.train
        if side is None or side.masked == 0 or side.empty < max(1, SHARE * side.masked):
            return self._by_log(m)
        mask = m.data.mask
        why, fix = _cause(mask, side.empty)
        figures: dict[str, object] = {"samples": side.masked, "empty": side.empty, "answer_tokens": side.answer_tokens}
        if mask is not None:
            figures |= {"without_answer": mask.answerless, "at_the_longest": mask.cut}
        return [
            Suspicion(
                fault=self.id,
                side="train",
                where=["train:tensor loss_mask"],
                says=f"{side.empty} of {side.masked} training samples have not one supervised token{why}",
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="the loss mask is empty",
                        prediction="every sample has at least one answer token if the mask is right",
                        measurement="the sum of the loss mask, sample by sample"
                        + (f"; the answers in the tokens, by {mask.marked_by}" if mask is not None else ""),
                        result=f"{side.empty} of {side.masked} samples sum to 0; {side.answer_tokens} answer tokens in all"
                        + (f"; of the empty ones {mask.answerless} hold no answer" if mask is not None else ""),
                        decides="lossmask-empty if samples sum to 0 (the loss is then exactly 0, where a lack of training gives "
                        "a high one)",
                        figures=figures,
                    )
                ],
                fix=Fix(says=f"{fix} Build the masks again, then retrain."),
                recovery="needs-retraining",
            )
        ]

    def _by_log(self, m: Measurements) -> list[Suspicion]:
        """Steps that taught nothing, where the masks themselves are not at hand."""
        curve = m.data.curve
        if curve is None or (m.train is not None and m.train.masked) or curve.zero < max(2, SHARE * curve.points):
            return []
        return [Suspicion(
            fault=self.id, side="train", where=[], strength="suspected",
            says=f"{curve.zero} of {curve.points} logged steps have a loss of exactly 0: nothing was supervised in them",
            evidence=[Evidence(
                hypothesis="samples without a supervised token", prediction="no step has a loss of exactly 0",
                measurement=f"the losses of the {curve.format} log", result=f"{curve.zero} of {curve.points} are 0",
                decides="lossmask-empty: a draft that is perfect has a small loss, not 0", figures={"zero": curve.zero})],
            fix=Fix(says="Look at the loss masks of the data (`draftscope inspect`), and give the states with --train."),
            recovery="needs-retraining")]

    def why_not(self, m: Measurements) -> str:
        side = m.train
        if side is None or not side.masked:
            return "no training sample with a loss mask was given (--train)"
        return f"{side.empty} of {side.masked} training samples have an empty mask; from {SHARE:.0%} it counts"

    def make(self, plant: Plant, variant: str) -> Plant:
        masks = {"all": "empty", "many": "empty in part", "cut before the first "
                                                          "answer": "cut", "no generation markers": "unmarked"}
        if variant not in masks:
            raise ValueError(f"lossmask-empty has no variant {variant!r}")
        return replace(plant, loss_mask=cast(LossMask, masks[variant]))


def _cause(mask: MaskFacts | None, empty: int) -> tuple[str, str]:
    """Why, as far as the tokens tell, and what to do."""
    look = ("Render one sample and look for the assistant marker that the mask is built from; many stock chat templates carry no "
            "generation markers.")
    if mask is None or not mask.empty:
        return "", look
    if mask.answerless >= MOST * mask.empty:
        if mask.cut >= MOST * mask.empty and mask.cut > 1:
            return (f": they are cut at {mask.longest} tokens, before their first answer",
                    "Take a larger maximal length (SpecForge data.max_length, speculators --total-seq-len), or leave such "
                    "samples "
                    "out.")
        return ": their tokens hold no answer", "Leave samples without an answer out, or give them one."
    if empty < MOST * mask.samples:
        return ", though their tokens hold answers: the marker is missing from part of the data", look
    if mask.generation is False:
        return (", though their tokens hold answers; the target's template has no generation markers, so that masks taken from "
                "them are empty",
                "Build masks from the assistant marker itself (SpecForge's chat_template, speculators' own regex), or put "
                "{% generation %} into the template.")
    return ", though their tokens hold answers: the marker was not found", look
