"""template: training texts and served requests are rendered differently."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_data import Frame, TemplateFacts
from draftscope.faults.measurements import Measurements, SideName
from draftscope.faults.plant import Plant
from draftscope.faults.writing import Rendering, Texts
from draftscope.findings import Evidence, Fix, Recovery, Strength

NEARLY, HARDLY = 0.9, 0.1
DIFFERING = 0.05
BLOCK = 3
"""Tokens that answers have to begin alike with for that to be a block, and no habit of words."""
KINDS: dict[str, Rendering] = {
    "system turn": "system turn", "other template": "other template", "doubled first token": "doubled first token",
    "no generation prompt": "no generation prompt", "thinking block": "thinking block", "bare text": "bare",
}


class Template(Fault):
    """Another chat template or system prompt, a thinking block, a doubled first token, no generation prompt."""

    id = "template"
    title = "rendered otherwise than trained"
    verdict = "data"
    variants = (*KINDS, "another system turn", *(f"train {name}" for name in ("system turn", "other template",
                                                                             "doubled first token", "thinking block")))
    page = Page(
        symptom="the draft does well on its training data and less well on the same questions served, worst at an answer's start",
        traces={
            **{name: Trace(says, "--train, --serve, --target", shows, "reference") for name, says, shows in (
                ("system turn", "the server's template, or its client, adds a system prompt",
                 "served requests begin with a system turn that training samples lack"),
                ("other template", "the server was given another chat template", "served prompts hold none of the markers that "
                 "training samples do"),
                ("doubled first token", "the template writes the first token and the tokenizer adds it again",
                 "served requests begin with the same token twice"),
                ("no generation prompt", "add_generation_prompt is off, so that the model writes the header itself",
                 "served prompts end before the assistant's header"),
                ("thinking block", "thinking is turned off, or on, for one side alone",
                 "a block stands between header and answer that training samples lack"),
                ("bare text", "the completion interface is used with text that no template saw",
                 "served prompts hold no marker at all"),
                ("another system turn", "each side has its own system prompt", "both begin with a system turn of fixed text, and "
                 "these texts differ"))},
            **{f"train {name}": Trace("the same, in the data writer", "--train, --serve, --target",
                                      "the training samples have what served requests lack", "reference")
               for name in ("system turn", "other template", "doubled first token", "thinking block")},
        },
        lookalikes={
            "data-offpolicy": "texts are rendered alike, and the target does not write the training answers or another domain is "
                              "served",
            "token-shift": "the tokens are alike and the states stand beside others",
            "run-ops": "conversations given beside the training data are altogether others, not the same in other tokens",
        },
        unseen={
            "a template that differs in turns with tools only": "seen with --conversations of such turns; not from prompts "
                                                                "served "
                                                                "without them",
            "which side is wrong": "neither is: what the draft was trained on decides, and the other has to follow",
        },
        reports=("SafeAILab/EAGLE issue #196", "z-lab/dflash issue #133", "Model-Optimizer PR #1211"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        facts = m.data.template
        if facts is None:
            return []
        return self._sides(facts, m) + self._rendered(facts)

    def _sides(self, facts: TemplateFacts, m: Measurements) -> list[Suspicion]:
        train, serve = facts.train, facts.serve
        if train is None or serve is None:
            return []
        told = difference(facts)
        if told is None:
            return []
        says, fix, strength = told
        figures: dict[str, object] = {
            "train": _figures(train), "serve": _figures(serve),
            "accepted_first": facts.early, "accepted_later": facts.later}
        late = "" if facts.early is None or facts.later is None else (
            f"; {facts.early:.2f} drafts a step accepted at the beginning of answers, {facts.later:.2f} later")
        return [_suspicion(
            says, "serve", strength, prediction="both sides begin, and lead up to the answer, with the same tokens",
            measurement=f"what {train.count} training samples, and {serve.count} served requests, have in common outside of "
                        "their "
            "contents", result=f"training: {_frame_words(train)}; served: {_frame_words(serve)}{late}",
            decides="template where a side's constant tokens differ; data-offpolicy where only contents do", fix=fix,
            figures=figures, recovery="needs-serving")]

    def _rendered(self, facts: TemplateFacts) -> list[Suspicion]:
        """Training samples against the target's own rendering of the conversations they were made from."""
        if facts.compared < 4 or facts.differing < DIFFERING * facts.compared:
            return []
        if facts.contents_differ > 0.5 * facts.differing:
            return []
        return [_suspicion(
            f"{facts.differing} of {facts.compared} training samples are not what the target's template makes of their "
            "conversations", "train", "supported",
            prediction="the target's chat template and tokenizer give the sample's token ids",
            measurement="conversations rendered by the target's own template, line by line", recovery="needs-retraining",
            result=f"{facts.differing} of {facts.compared} differ with the same contents; {facts.first_difference}",
            decides="template where contents agree and tokens do not; run-ops where the contents are others",
            fix="Render training data with the target's own template and tokenizer (SpecForge: the chat_template of that target; "
                "speculators take the tokenizer's), and write the states again.",
            figures={"differing": facts.differing, "of": facts.compared})]

    def why_not(self, m: Measurements) -> str:
        facts = m.data.template
        if facts is None or facts.train is None or facts.serve is None:
            return "takes training states with masks and a capture that knows its prompts (--train, --serve), some of each"
        return (f"{facts.train.count} training samples and {facts.serve.count} requests begin and lead up to their answers "
                "alike: "
                f"{_frame_words(facts.serve)}")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "another system turn":
            return replace(plant, texts=replace(plant.texts, train="system turn", serve="other system turn"))
        name = variant.removeprefix("train ")
        if name not in KINDS or variant not in self.variants:
            raise ValueError(f"template has no variant {variant!r}")
        if variant.startswith("train "):
            return replace(plant, texts=replace(plant.texts, train=KINDS[name]))
        return replace(plant, texts=replace(plant.texts, serve=KINDS[name]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        """Serve as was trained."""
        return replace(plant, texts=Texts(train=plant.texts.train, serve=plant.texts.train))


def difference(facts: TemplateFacts) -> tuple[str, str, Strength] | None:
    """What differs between the sides, how to mend it, and how sure that is; None where nothing does."""
    train, serve = facts.train, facts.serve
    if train is None or serve is None:
        return None
    sure: Strength
    lesser: Strength
    serves = "Serve with the chat template, the system prompt and the thinking switch of the training data"
    # Another system prompt is another text first of all: many drafts bear it.
    sure, lesser = ("proven", "supported") if facts.known else ("suspected", "suspected")
    if train.doubled != serve.doubled and _doubled(*((serve, train) if serve.doubled else (train, serve))):
        side, other = ("served requests", "training samples") if serve.doubled else ("training samples", "served requests")
        return (f"{side} begin with the same token twice, {other} do not: the template writes it and the tokenizer adds it again",
                "Let one alone write the first token: encode rendered text with add_special_tokens=False.", sure)
    if train.marked is not None and serve.marked is not None and abs(train.marked - serve.marked) >= NEARLY - HARDLY:
        if _same_up_to(train, serve):
            return ("served prompts end before the assistant's header that training samples have: the generation prompt is "
                    "missing" if serve.marked < train.marked else
                    "training samples lack the assistant's header that served prompts end with",
                    "Render prompts with add_generation_prompt=True.", sure)
        which = "served prompts" if serve.marked < train.marked else "training samples"
        return (f"{which} hold no marker of the target's chat template before the answer; the other side's all do: "
                "two templates are in use, or none", f"{serves}.", sure)
    if train.system is not None and serve.system is not None and abs(train.system - serve.system) >= NEARLY - HARDLY:
        with_turn, without = ("served requests", "training sample") if serve.system > train.system else (
            "training samples", "served request")
        return (f"{with_turn} begin with a system turn that hardly a {without} has", f"{serves}.", lesser)
    if train.tail and serve.tail and not _ends_alike(train.tail, serve.tail):
        return ("what stands between question and answer differs: a thinking block, or another header",
                f"{serves} (enable_thinking, or what the template calls it).", sure)
    sides = ((train, facts.opened[0], "training", "served"), (serve, facts.opened[1], "served", "training"))
    for one, shared, whose, other in sides:
        if len(one.opening) >= BLOCK and shared <= HARDLY:
            return (f"nearly all {whose} answers begin with “{one.shown.get('opening', list(one.opening))}”, {shared:.0%} of the "
                    f"{other} ones do: a thinking block, or another way to answer", f"{serves}.", lesser)
    if facts.lacking:
        token, (mine, theirs) = next(iter(facts.lacking.items()))
        return (f"the special token {facts.named.get(token, token)} is in {mine:.0%} of the training samples and {theirs:.0%} of "
                "the served requests", f"{serves}.", "supported")
    common = min(len(train.head), len(serve.head))
    if train.head[:common] != serve.head[:common]:
        system = (train.system or 0) >= NEARLY and (serve.system or 0) >= NEARLY
        where = next(i for i in range(common) if train.head[i] != serve.head[i])
        return ("the fixed system prompts of training samples and served requests differ" if system else
                "training samples and served requests begin alike only up to token "
                f"{where}", f"{serves}.", lesser if system else sure)
    return None


def _doubled(twice: Frame, once: Frame) -> bool:
    """Whether one side is the other with its first token written again."""
    return bool(once.head) and twice.head[1 : 1 + len(once.head)] == once.head


def _same_up_to(train: Frame, serve: Frame) -> bool:
    """Whether one side's tail goes on where the other's ends: the header alone is missing."""
    longer, shorter = (train.tail, serve.tail) if len(train.tail) > len(serve.tail) else (serve.tail, train.tail)
    return bool(shorter) and longer[: len(shorter)] == shorter and len(longer) > len(shorter)


def _ends_alike(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two tails are one, as far as both are known."""
    common = min(len(a), len(b))
    return a[-common:] == b[-common:]


def _frame_words(frame: Frame) -> str:
    head, tail = frame.shown.get("head", str(list(frame.head))), frame.shown.get("tail", str(list(frame.tail)))
    return f"begin “{head}”, lead up to the answer with “{tail}”"


def _figures(frame: Frame) -> dict[str, object]:
    return {"texts": frame.count, "head": list(frame.head), "tail": list(frame.tail), "opening": list(frame.opening),
            "system": frame.system, "marked": frame.marked}


def _suspicion(says: str, side: SideName, strength: Strength, *, prediction: str, measurement: str, result: str, decides: str,
               fix: str, figures: dict[str, object], recovery: Recovery) -> Suspicion:
    return Suspicion(
        fault=Template.id, side=side, where=[], says=says, strength=strength,
        evidence=[Evidence(hypothesis="training and serving render texts differently", prediction=prediction,
                           measurement=measurement, result=result, decides=decides, figures=figures)],
        fix=Fix(says=fix), recovery=recovery,
        caveats=["what it costs takes serving both ways: replay cannot re-render a request"])
