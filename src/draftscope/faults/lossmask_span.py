"""lossmask-span: the loss mask is there, but not on the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_data import MaskFacts
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import LossMask, Plant
from draftscope.findings import Evidence, Fix, Strength

MOST = 0.8
SOME = 0.2
"""Share of the answers from which an edge of their masks counts."""
USERS = 0.02
"""Supervised share of other turns from which it counts."""
LEAST, CLOSED = 4, 3
"""Answers from which edges are judged, and finished ones."""
UNLIKE = 3
"""Unlike tokens that a mask has to leave out where answers begin: less is what a template opens them with."""
APART = 0.3
"""By how much earlier answers agree less with the target than the last ones, from which they were not meant to be taught."""
MASKS = {
    "one token early": "early", "one token late": "late", "five tokens early": "early", "three tokens late": "late",
    "whole conversation": "whole", "user turns": "users", "end of turn missing": "open", "markers supervised": "markers",
    "of another sample": "other's", "last turn alone ignored": "every turn",
}
_BY = {"five tokens early": 5, "three tokens late": 3}


class LossmaskSpan(Fault):
    """Displaced, the whole conversation, user turns, markers, another sample's mask, every turn where one was asked for."""

    id = "lossmask-span"
    title = "the wrong tokens supervised"
    verdict = "data"
    variants = tuple(MASKS)
    page = Page(
        symptom="training looks well and acceptance is a little or much lower than for the same data elsewhere",
        traces={
            "one token early": Trace("the trainer or data writer shifts the mask with the labels", "--train, --target",
                                     "every run of the mask begins and ends one token before its answer", "trained"),
            "one token late": Trace("the mask is shifted the other way", "--train, --target",
                                    "every run begins one token after its answer's first", "trained"),
            "five tokens early": Trace("the text is given a prefix (a system turn, special tokens) after its mask was made",
                                       "--train, --target", "every run begins and ends as many tokens early", "trained"),
            "three tokens late": Trace("a prefix is cut off the text and not off its mask", "--train, --target",
                                       "every run begins and ends as many tokens late", "trained"),
            "whole conversation": Trace("no mask is built, or it is ignored and written as all ones", "--train, --target",
                                        "the mask is 1 on user turns and markers too", "trained"),
            "user turns": Trace("the roles are mixed up, or corner cases of a template leave the span open", "--train, --target",
                                "part of the supervised tokens lie in user turns, markers apart", "trained"),
            "end of turn missing": Trace("the pattern of the answer stops before the closing token", "--train, --target",
                                         "every run ends one token before its answer's closing one", "trained"),
            "markers supervised": Trace("the span begins with the assistant's header", "--train, --target",
                                        "runs begin with the marker's first token", "trained"),
            "of another sample": Trace("masks and tokens are filtered or sorted apart in the data writer", "--train, --target",
                                       "a mask fits another sample's answers to the token, not its own", "trained"),
            "last turn alone ignored": Trace(
                "a flag to teach the last answer alone is ignored, and earlier answers are not the target's",
                "--train, --target", "every answer is supervised; the target writes the last ones and not the "
                                     "earlier", "trained"),
        },
        lookalikes={
            "lossmask-empty": "masks without one supervised token",
            "token-shift": "moves states against tokens; here states and tokens agree and the mask alone is off",
            "data-offpolicy": "the target writes no answer of the data; a flag ignored leaves the last answers its own",
        },
        unseen={"a mask that the trainer shifts itself": "what it does to a right mask is in its code: `inspect --as` says "
                                                         "what is "
                                                         "known of each"},
        reports=("speculators PR #865", "TorchSpec PR #37", "transformers PR #47326"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        mask = m.data.mask
        if mask is None or mask.samples == 0:
            return []
        for rule in (_of_another, _displaced, _whole, _users, _edges, _every_turn):
            found = rule(mask)
            if found is not None:
                return [found]
        return []

    def why_not(self, m: Measurements) -> str:
        mask = m.data.mask
        if mask is None or not mask.samples:
            return "no training sample with a mask and an answer in its tokens was given (--train, and --target for its template)"
        right = mask.offsets.get((0, 0), 0)
        return (f"by {mask.marked_by}, {right} of {sum(mask.offsets.values())} answers are supervised from their first token "
                "to the one that "
                f"closes them; {mask.other_share:.1%} of other turns are")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in MASKS:
            raise ValueError(f"lossmask-span has no variant {variant!r}")
        return replace(plant, loss_mask=cast(LossMask, MASKS[variant]), by=_BY.get(variant, 1))


def _of_another(mask: MaskFacts) -> Suspicion | None:
    if mask.other_sample < max(LEAST, 0.05 * mask.samples) or mask.other_sample < MOST * mask.of:
        return None
    moved = "" if mask.by is None else f", {abs(mask.by)} {'further on' if mask.by > 0 else 'back'} in the order of the files"
    return _suspicion(
        mask, f"{mask.other_sample} of {mask.samples} masks are another sample's{moved}", "proven",
        prediction="each mask lies on its own sample's answers",
        result=f"{mask.of} masks do not lie on their own sample's answers; {mask.other_sample} are another sample's to the token",
        decides="lossmask-span where a mask fits another sample exactly and not its own; shifted masks fit their own",
        fix="Filter, sort and write tokens, states and masks together, keyed by the sample's index; write the data again.",
        figures={"other_sample": mask.other_sample, "of": mask.of, "by": mask.by})


def _displaced(mask: MaskFacts) -> Suspicion | None:
    of = sum(mask.offsets.values())
    wrong = {by: times for by, times in mask.moved.items() if by < 0 or (by > 0 and mask.skipped.get(by, 0) >= UNLIKE)}
    by = max(wrong, key=lambda one: wrong[one], default=0)
    if of < LEAST or not by or wrong[by] < max(CLOSED, SOME * of):
        return None
    tokens = "one token" if abs(by) == 1 else f"{abs(by)} tokens"
    return _suspicion(
        mask, f"the masks of {wrong[by]} of {of} answers begin and end {tokens} {'early' if by < 0 else 'late'}", _sure(mask),
        prediction="runs begin with the answer's first token and end with the one that closes it",
        result=f"the masks over {wrong[by]} of {of} answers are those of their own samples' answers, displaced by {by:+d}",
        decides="lossmask-span by a displacement: every edge says the same",
        fix="Take the shift out where the mask is made or loaded: a token's mask says that this token belongs to an answer; "
            "trainers shift on their own. Then retrain." if abs(by) == 1 else
            "Count the mask's positions on the tokens that are stored: what is put in front, left out or shifted after it was "
            "made displaces it. Write the masks again, then retrain.",
        figures={"begins": by, "ends": by, "answers": wrong[by], "of": of},
        caveats=["a trainer of your own that takes the mask as rows to be taught, not as answer tokens, reads it rightly"]
        if by == -1 else [])


def _whole(mask: MaskFacts) -> Suspicion | None:
    if mask.whole < max(1, SOME * mask.samples):
        return None
    return _suspicion(
        mask, f"{mask.whole} of {mask.samples} samples are supervised throughout, user turns and markers included", "supported",
        prediction="the mask is 0 outside of answers", result=f"the mask is 1 throughout {mask.whole} of {mask.samples} samples, "
        f"on {mask.other_share:.0%} of the tokens of other turns",
        decides="lossmask-span; some trainers teach all tokens by design, and then it is a choice",
        fix="Build masks of the answers alone (ModelOpt: answer_only_loss; SpecForge and speculators build them from the "
            "assistant "
            "marker), then retrain.",
        figures={"whole": mask.whole, "other_share": mask.other_share},
        caveats=["teaching prompts too may be meant: what it costs is not known before a draft was trained without"])


def _users(mask: MaskFacts) -> Suspicion | None:
    if mask.other_share < USERS:
        return None
    return _suspicion(
        mask, f"{mask.other_share:.0%} of the tokens in user and system turns are supervised", _sure(mask),
        prediction="no token of another turn is supervised",
        result=f"{mask.other_share:.1%} of the tokens outside answers and markers, {mask.header_share:.1%} of the markers",
        decides="lossmask-span where supervised tokens lie in other turns",
        fix="Close each span at the answer's end-of-turn token, and check the roles; write the masks again, then retrain.",
        figures={"other_share": mask.other_share, "header_share": mask.header_share})


def _edges(mask: MaskFacts) -> Suspicion | None:
    of = sum(mask.offsets.values())
    if of < LEAST:
        return None
    headers = sum(count for (first, _), count in mask.offsets.items() if first < -1)
    if headers >= SOME * of:
        return _suspicion(
            mask, f"the masks of {headers} of {of} answers begin in the marker before them", "supported",
            prediction="markers before an answer are not supervised: the server writes them",
            result=f"{headers} of {of} runs begin two or more tokens early; {mask.header_share:.0%} of the markers' tokens are "
            "supervised",
            decides="lossmask-span at the beginning alone",
            fix="Begin the span after the assistant's header, then retrain.",
            figures={"answers": headers, "of": of, "header_share": mask.header_share})
    if mask.closed >= CLOSED and mask.open >= MOST * mask.closed:
        return _suspicion(
            mask, f"{mask.open} of {mask.closed} finished answers are supervised without the token that ends them", "supported",
            prediction="the closing token is supervised: a draft that is never taught it never proposes it",
            result=f"{mask.open} of {mask.closed} runs end one token before the closing one",
            decides="lossmask-span at the end alone",
            fix="Let the answer's span include its end-of-turn token, then retrain.",
            figures={"open": mask.open, "of": mask.closed})
    return None


def _every_turn(mask: MaskFacts) -> Suspicion | None:
    first, last = mask.first_agreement, mask.last_agreement
    if first is None or last is None or mask.all_turns < max(LEAST, MOST * mask.repeats) or last - first < APART:
        return None
    return _suspicion(
        mask, "every answer of a conversation is supervised, and only the last ones are the target's own", "supported",
        prediction="what is supervised is what the target writes",
        result=f"the target's first choice is {last:.0%} of the last answers' tokens and {first:.0%} of the earlier ones'; "
        f"{mask.all_turns} of {mask.repeats} conversations have every answer supervised",
        decides="lossmask-span (a flag for the last turn ignored) where the last answers alone are the target's; data-offpolicy "
        "where none are",
        fix="Set the trainer's flag for the last turn (SpecForge data.train_only_last_turn, TorchSpec last_turn_loss_only), "
            "check "
            "that it arrives in the masks, or let the target write the earlier answers too.",
        figures={"first_agreement": first, "last_agreement": last, "conversations": mask.repeats})


def _sure(mask: MaskFacts) -> Strength:
    return "proven" if mask.marked_by == "the target's chat template" else (
        "suspected" if mask.marked_by == "repeated separators" else "supported")


def _suspicion(mask: MaskFacts, says: str, strength: Strength, *, prediction: str, result: str, decides: str, fix: str,
               figures: dict[str, object], caveats: list[str] | None = None) -> Suspicion:
    return Suspicion(
        fault=LossmaskSpan.id, side="train", where=["train:tensor loss_mask"], says=says, strength=strength,
        evidence=[Evidence(
            hypothesis="the loss mask lies on other tokens than the answers", prediction=prediction,
            measurement=f"masks against the answers in the token ids, found by {mask.marked_by}", result=result,
            decides=decides, figures=figures)],
        fix=Fix(says=fix), recovery="needs-retraining", caveats=list(caveats or ()))
