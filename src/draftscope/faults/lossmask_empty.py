"""lossmask-empty: samples without one supervised token."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

SHARE = 0.05


class LossmaskEmpty(Fault):
    """The assistant marker was never found in the text, or samples were cut before the first answer token."""

    id = "lossmask-empty"
    title = "nothing supervised"
    verdict = "data"
    variants = ("all",)

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side = m.train
        if side is None or side.masked == 0 or side.empty < max(1, SHARE * side.masked):
            return []
        return [
            Suspicion(
                fault=self.id,
                side="train",
                where=["train:tensor loss_mask"],
                says=f"{side.empty} of {side.masked} training samples have not one supervised token",
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="the loss mask is empty",
                        prediction="every sample has at least one answer token if the mask is right",
                        measurement="the sum of the loss mask, sample by sample",
                        result=f"{side.empty} of {side.masked} samples sum to 0; {side.answer_tokens} answer tokens in all",
                        decides="lossmask-empty if samples sum to 0 (the loss is then exactly 0, where a lack of training gives "
                        "a high one)",
                        figures={"samples": side.masked, "empty": side.empty, "answer_tokens": side.answer_tokens},
                    )
                ],
                fix=Fix(
                    says="Render one sample and look for the assistant marker that the mask is built from; many stock chat "
                    "templates carry no generation markers. Build the masks again, then retrain."
                ),
                recovery="needs-retraining",
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant != "all":
            raise ValueError(f"lossmask-empty has no variant {variant!r}")
        return replace(plant, loss_mask="empty")
