"""leak: training saw what a server does not show."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.checking import spoilt
from draftscope.faults.measurements import CLEARLY, OTHER, SAME, Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.writing import Texts
from draftscope.findings import Evidence, Fix, Strength

ABOVE = 0.25
"""Accuracy of the log over that of replay, from which training saw more than a single sample shows."""
KNOWN = 0.05
"""Share of held-out samples from which those that were trained on count."""


class Leak(Fault):
    """States that hold later tokens, documents that see one another, held-out samples that were trained on."""

    id = "leak"
    title = "training saw more than serving shows"
    verdict = "data"
    variants = ("trainer shows the next state", "train packed documents", "train held-out samples")
    page = Page(
        symptom="training and evaluation look excellent, serving does not, and no state is wrong",
        traces={
            "trainer shows the next state": Trace(
                "the trainer hands the draft a state, label or block that holds a later token", "--train, --draft, --target, "
                                                                                                "--log",
                "the log's accuracy is far above that of replay on the very same samples", "trained"),
            "train packed documents": Trace(
                "documents are packed into one sample and run as one text", "--train, --target",
                "rows of the later document equal the target run over both, not over that document alone", "none"),
            "train held-out samples": Trace("the held-out set was cut from the same data", "--train, --train-heldout",
                                            "held-out samples have the tokens of training samples", "none"),
        },
        lookalikes={
            "train-budget": "over-training keeps its accuracy on training samples in replay; a leak does not",
            "vocab-map": "a checkpoint that lost its map is poor in replay and good in the log; it is judged from the file",
            "config-flag": "so is one read otherwise than trained: a switch turned mends it",
            "token-shift": "states of the files that stand one row on: the files show it",
            "run-ops": "copies within one folder",
        },
        unseen={"blocks of a parallel drafter that overlap": "not of EAGLE-3; its trace is the same: log against replay"},
        reports=("SpecForge issue #470",))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._by_log(m) + self._documents(m) + self._heldout(m)

    def _by_log(self, m: Measurements) -> list[Suspicion]:
        leak = m.data.leak
        if leak is None or leak.logged is None or leak.replayed is None or leak.logged - leak.replayed < ABOVE:
            return []
        other = m.embedding is not None and (m.embedding.own or 0) - (m.embedding.target or 0) > CLEARLY
        lost = m.vocabulary is not None and m.vocabulary.stored not in ("offset", "none needed")
        if other or lost or spoilt(m) or m.turned is not None or m.missing or m.poisoned or m.departed == "train":
            return []
        return [_suspicion(
            ["train:accuracy"], f"the training log says {leak.logged:.0%} at the first position, replay on the training samples "
            f"{leak.replayed:.0%}: training saw more than a sample shows", "supported",
            hypothesis="the draft was trained on states, labels or blocks that hold later tokens",
            prediction="replay on single training samples gives the accuracy that the log ends with",
            measurement="the log's last accuracy against the draft replayed on the training states, one sample at a time",
            result=f"{leak.logged:.1%} logged, {leak.replayed:.1%} replayed",
            decides="leak where the log alone is good; train-budget where both are poor; over-training where both are good and "
            "held-out samples are not",
            fix="Look at how the trainer shifts states against tokens, at the masks of packed documents and of parallel "
                "blocks; train "
                "on one sample with batch size 1 and compare its accuracy with `draftscope replay`.",
            figures={"logged": leak.logged, "replayed": leak.replayed},
            caveats=["a log of another run, or a checkpoint that lost something in its export, looks the same: check both"])]

    def _documents(self, m: Measurements) -> list[Suspicion]:
        leak = m.data.leak
        if leak is None or not leak.documents or leak.alone is None or leak.together is None:
            return []
        if leak.alone < OTHER or leak.together > SAME:
            return []
        return [_suspicion(
            ["train:samples"], f"{leak.documents} documents stand behind another one in their sample, and their states have "
                               "seen it",
            "proven", hypothesis="packed documents attend to one another",
            prediction="the states of a document are those of the target run over it alone, as a request is",
            measurement=f"{leak.seen} rows of later documents against the target run over the document alone, and over the "
                        "sample",
            result=f"median relative error {leak.alone:.3f} alone, {leak.together:.3f} with what stands before",
            decides="leak where the states are those of the whole sample; a healthy packer runs each document alone",
            fix="Run each document by itself, or pack with a document mask and positions that begin again (speculators: "
                "document_ids); "
                "write the states again.",
            figures={"documents": leak.documents, "rows": leak.seen, "alone": leak.alone, "together": leak.together})]

    def _heldout(self, m: Measurements) -> list[Suspicion]:
        leak = m.data.leak
        if leak is None or not leak.heldout:
            return []
        known: int
        strength: Strength
        if leak.known >= max(1, KNOWN * leak.heldout):
            known, strength = leak.known, "proven"
        elif leak.same_prompt >= max(2, 0.5 * leak.heldout):
            known, strength = leak.same_prompt, "suspected"
        else:
            return []
        what = "are training samples, to the token" if strength == "proven" else "have the prompt of a training sample"
        return [_suspicion(
            ["train:heldout"], f"{known} of {leak.heldout} held-out samples {what}: their acceptance is none of unseen text",
            strength, hypothesis="the held-out set is part of the training set", prediction="no held-out sample was trained on",
            measurement="token ids of held-out samples against those of all training samples read",
            result=f"{leak.known} of {leak.heldout} are equal, {leak.same_prompt} have an equal prompt",
            decides="leak where tokens are equal; another answer to the same prompt is a weaker one",
            fix="Hold samples out by prompt, before anything is written; evaluate again.",
            figures={"heldout": leak.heldout, "known": leak.known, "same_prompt": leak.same_prompt})]

    def why_not(self, m: Measurements) -> str:
        leak = m.data.leak
        if leak is None:
            return "takes the training's log beside states and draft (--log, --train, --draft), or held-out samples"
        told = []
        if leak.logged is not None and leak.replayed is not None:
            told.append(f"the log's accuracy is {leak.logged:.0%}, that of replay {leak.replayed:.0%}")
        told.append(f"{leak.documents} documents behind others in their sample")
        told.append(f"{leak.known} of {leak.heldout} held-out samples are training samples")
        return "; ".join(told)

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "trainer shows the next state":
            return replace(plant, training="next state seen")
        if variant == "train packed documents":
            return replace(plant, texts=Texts(train="system turn", serve="system turn", packed=True))
        if variant == "train held-out samples":
            return replace(plant, heldout="of training")
        raise ValueError(f"leak has no variant {variant!r}")


def _suspicion(where: list[str], says: str, strength: Strength, *, hypothesis: str, prediction: str, measurement: str,
               result: str, decides: str, fix: str, figures: dict[str, object], caveats: list[str] | None = None) -> Suspicion:
    return Suspicion(
        fault=Leak.id, side="train", where=where, says=says, strength=strength,
        evidence=[Evidence(hypothesis=hypothesis, prediction=prediction, measurement=measurement, result=result, decides=decides,
                           figures=figures)],
        fix=Fix(says=fix), recovery="needs-retraining", caveats=list(caveats or ()))
