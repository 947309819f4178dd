"""From suspicions with their costs to the answer: ranked findings, the verdict, what to measure next."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftscope.diagnose.confidence import confidence_of
from draftscope.diagnose.cutting import beyond
from draftscope.diagnose.effects import Costs, left_out, loss, mending, trained_so
from draftscope.diagnose.norms import measure_norms
from draftscope.diagnose.power import NOTICEABLE, UNPAIRED, paired, power_of
from draftscope.diagnose.reference import explained
from draftscope.diagnose.views import views
from draftscope.diagnose.weighing import blame_the_recording, not_the_cost, of_the_runtime, worsens
from draftscope.faults import FAULTS, fault
from draftscope.faults.base import Suspicion, verdict_of
from draftscope.faults.measurements import OTHER, SAME, TRAINED, Measurements
from draftscope.findings import STRONGEST_FIRST, Diagnosis, Effect, Finding, Ladder, Mended, Placed, Rung, Verdict

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

BY_SLOT = frozenset({"layer-set", "layer-offset", "residual-missing", "scale-mult", "token-shift", "final-norm",
                     "rotated-space"})
LOADED = frozenset({"weight-missing", "vocab-map", "tied-head", "quant-inherit", "config-flag"})
"""Of what an engine has loaded: proven on the serving side, it is why replay as read is not what the engine did."""
SOUND = 0.9
"""Share of a slot's rows that must match for it to be right."""
POOR = 0.35
"""Acceptance at the first position below which a draft may be of another target, or have hardly learned."""
SPANS = {
    "trained": "training",
    "reference": "text (template, domain, over-fitting)",
    "served": "capture, wiring, precision",
    "as_read": "configuration, loading",
    "measured": "runtime (draft cache, positions, graphs, sampler, counting)",
}
UNSEEN = ("; the draft has learned these training states by heart, perhaps: give some that it did not learn from "
          "(--train-heldout), which tell over-fitting from another text")
AFTER = {"needs-retraining": "takes another training", "needs-serving": "takes serving again", "bounded": "was not replayed",
         "replayed": "was not replayed"}
_ORDER = {known.id: i for i, known in enumerate(FAULTS)}


@dataclass(slots=True)
class Judged:
    """A suspicion and what it costs (None = not replayed)."""

    suspicion: Suspicion
    effect: Effect | None


def rank(judged: list[Judged]) -> list[Judged]:
    """Proven before supported before suspected; within a strength by the loss with all else repaired."""
    return sorted(judged, key=_place)


def _place(judged: Judged) -> tuple[int, float, float, int]:
    length, likelihood = loss(judged.effect)
    return STRONGEST_FIRST[judged.suspicion.strength], -length, -likelihood, _ORDER.get(judged.suspicion.fault, len(_ORDER))


def conclude(examination: Examination, judged: list[Judged], found: Costs | None) -> Diagnosis:
    """The diagnosis as the contract has it."""
    m, rungs = examination.m, examination.rungs
    for j in judged:
        _weigh(j, examination)
    ranked = rank(judged)
    caveats = _caveats(examination, found)
    findings = [
        Finding(
            fault=j.suspicion.fault,
            where=j.suspicion.where,
            says=j.suspicion.says,
            strength=j.suspicion.strength,
            confidence=_confidence(j.suspicion, m),
            recovery=_recovery(j),
            acceptance=j.effect,
            evidence=j.suspicion.evidence,
            fix=j.suspicion.fix,
            caveats=[*j.suspicion.caveats, *(caveats if j.effect is not None else []), *_label_caveats(examination, j.suspicion)],
        )
        for j in ranked
    ]
    contradicted = [one.says for one in examination.contradictions]
    gaps = _open_questions(examination, findings)
    repair = [] if found is None or examination.ladder is None else mending(
        examination.ladder, [j.suspicion for j in ranked if j.effect is not None], examination.as_read)
    verdict: Verdict
    if ranked:
        first = ranked[0].suspicion
        verdict = verdict_of(fault(first.fault), first) if first.fault in _ORDER else "wiring"
    else:
        verdict = "undecided" if gaps or contradicted else "clean"
    return Diagnosis(
        schema="draftscope.diagnosis/1",
        verdict=verdict,
        findings=findings,
        repair=repair,
        placement=examination.placement(),
        norms=measure_norms(examination.case),
        acceptance=Ladder(**rungs),
        matched={**examination.matched, "reference": m.reference_from},
        power=power_of(examination),
        next=list(dict.fromkeys([
            *contradicted, *_in_order(repair, ranked, rungs), *left_out(found), *gaps,
            *(examination.next if verdict != "clean" else []),
        ])),
        steps=examination.steps + examination.case.notes,
        provenance=examination.provenance(),
        views=views(examination),
    )


def _in_order(repair: list[Mended], ranked: list[Judged], rungs: dict[str, Rung]) -> list[str]:
    """The order in which to mend several faults: first what replay could undo, with what each step brings, then the others.

    What takes new data or another training comes last: its effect shows only in a draft that is served rightly.
    """
    others = [j.suspicion for j in ranked if j.effect is None and j.suspicion.strength != "suspected"]
    others.sort(key=lambda suspicion: suspicion.side == "train" or suspicion.recovery == "needs-retraining")
    if len(repair) + len(others) < 2:
        return []
    steps = [f"{step.fault} ({', '.join(step.where)})" + ("" if step.length is None else f": {step.length:.2f}")
             for step in repair]
    for one in others:
        where = f" ({', '.join(one.where[:3])})" if one.where else ""
        steps.append(f"{one.fault}{where}, which {AFTER[one.recovery]}")
    now = rungs.get("as_read") or rungs.get("served")
    begin = "" if now is None or now.length is None else f"from {now.length:.2f} "
    told = f", accept length by replay {begin}to" if repair else ""
    return [f"mend in this order{told}: {'; '.join(f'{i}. {step}' for i, step in enumerate(steps, 1))}; then measure again"]


def _weigh(judged: Judged, examination: Examination) -> None:
    """What a slot should hold is known from training states; a configuration only claims it.

    Against a claim alone, states prove a departure from the claim, not a fault: it is `supported` until the replay of the states
    as claimed is better beyond its interval.
    """
    suspicion, effect, m = judged.suspicion, judged.effect, examination.m
    by_slot = suspicion.fault in BY_SLOT and not suspicion.runtime
    if misrecorded(m) and by_slot and suspicion.side == "serve":
        blame_the_recording(suspicion)
        return
    if worsens(effect) and suspicion.runtime and suspicion.undo is not None and examination.ladder is not None:
        known = "trained" in examination.rungs  # else the training states do not fit the draft
        of_the_runtime(suspicion, effect, trained_so(examination.ladder, suspicion.undo, examination.as_read,
                                                     examination.case.inputs.seed) if known else None)
        return
    if worsens(effect) and (not by_slot or m.reference_from != TRAINED):
        not_the_cost(suspicion, effect)
        return
    if not by_slot or suspicion.strength != "proven" or m.reference_from == TRAINED:
        return
    if effect is not None and effect.gain_interval is not None and effect.gain_interval[0] > 0:
        return
    suspicion.strength = "supported" if effect is None or (effect.gain or 0) > 0 else "suspected"
    suspicion.caveats.append(
        "what the draft was trained on was not given (--train): the reference is what its configuration says" if m.train is None
        else "the reference is what the draft's configuration says: the training files given hold something else"
    )


def _confidence(suspicion: Suspicion, m: Measurements) -> float | None:
    cell = confidence_of(suspicion.fault, suspicion.strength, min((side.tokens for side in m.sides()), default=0))
    return None if cell is None else cell.confidence


def _recovery(judged: Judged) -> Any:
    if judged.suspicion.recovery == "replayed" and judged.effect is None:
        return "bounded" if judged.suspicion.side == "serve" else "needs-retraining"
    return judged.suspicion.recovery


def _caveats(examination: Examination, found: Costs | None) -> list[str]:
    m, caveats = examination.m, []
    if m.gate is None:
        caveats.append(
            "no verify steps were recorded, so that replay could not be held against the engine: its figures are an estimate"
        )
    elif not m.gate.passed and not any(gate.passed for gate in m.gate_with.values()):
        caveats.append(
            f"replay gives the engine's own counts in only {m.gate.share:.1%} of the steps: replayed figures are an estimate"
        )
    reference = None if found is None else found.reference
    repaired = None if found is None else found.repaired
    if reference is not None and repaired is not None and _below(repaired, reference):
        caveats.append(
            f"with all of this undone the replay reaches {repaired.length:.2f}, the target's own states "
            f"{reference.length:.2f}: something is left"
        )
    return caveats


def _below(lower: Rung, upper: Rung) -> bool:
    if lower.length is None or upper.length is None:
        return False
    edge = lower.interval[1] if lower.interval else lower.length + 0.05
    return upper.length > max(edge, lower.length + 0.02)


def _label_caveats(examination: Examination, suspicion: Suspicion) -> list[str]:
    train = examination.m.train
    if train is None or not suspicion.fault.startswith("layer"):
        return []
    wrong = [f"“{p.label}” is {_is(p)}" for p in [*train.slots, *([train.last] if train.last else [])] if label_is_wrong(p)]
    return [f"the training file's labels are wrong: {', '.join(wrong)}"] if wrong else []


def label_is_wrong(placed: Placed) -> bool:
    """Whether a label that claims the embedding or a number names another place than the one found."""
    if placed.boundary is None:
        return False
    if "embed" in placed.label.lower():
        return placed.boundary != 0
    number = re.search(r"(?:layer|boundary|hs|h)[ _]?(\d+)", placed.label.lower())
    if "entry" in placed.label.lower() or number is None:
        return False
    claimed = int(number[1])
    return placed.boundary != claimed if "boundary" in placed.label.lower() else placed.boundary not in (claimed, claimed + 1)


def _is(placed: Placed) -> str:
    return "the embedding" if placed.boundary == 0 else f"boundary {placed.boundary}"


def _open_questions(examination: Examination, findings: list[Finding]) -> list[str]:
    """What keeps a diagnosis without findings from being clean, and what stays unexplained beside findings."""
    m, questions = examination.m, []
    named = {where for finding in findings for where in finding.where}
    for side in m.sides():
        if side.proof != "sweep":
            continue
        lost = [p for p in side.slots if p.boundary is None and side.where(p.slot) not in named]
        if lost:
            questions.append(
                f"{', '.join(side.where(p.slot) for p in lost)} hold no state that this target has over these tokens, under "
                "any reading tried: check that the tokens, the target and its precision are those of the capture"
            )
        for placed in side.slots:
            if placed.boundary is not None and side.where(placed.slot) not in named and not _sound(placed):
                shares = ", ".join(f"{share:.0%} {name}" for name, share in placed.shares.items() if share >= 0.01)
                questions.append(
                    f"{side.where(placed.slot)} is boundary {placed.boundary} only by {placed.transform} ({shares}): rows "
                    "moved about, of other requests, or in another basis; capture one request alone and compare"
                )
    train = m.train
    if train is not None and train.last is not None and m.layers is not None and train.last.boundary != m.layers and (
            train.where(-1) not in named):
        held = "holds no state of this target" if train.last.boundary is None else f"is not the last state but {_is(train.last)}"
        questions.append(f"{train.where(-1)} {held}: look at how the trainer reads the file")
    if m.serve is None or m.serve.proof != "sweep":
        questions.append("the serving slots were not placed: that takes a capture (--serve) and the target's weights (--target)")
    elif not m.reference:
        questions.append("what the draft was trained on is unknown: give training states (--train) or the draft (--draft)")
    if examination.case.checkpoint is None:
        questions.append("the draft itself was not looked at: give it (--draft)")
    if m.runtime is not None and m.runtime.drawn and m.runtime.settled:
        pass
    elif m.gate is None:
        questions.append(f"the engine's own behaviour was not held against replay: {_no_gate(examination)}")
    elif not m.gate.passed and not any(gate.passed for gate in m.gate_with.values()) and not (
        _other_map(m) or misrecorded(m) or any(
            f.fault in LOADED and f.strength == "proven" and not f.where[0].startswith("train:") for f in findings if f.where)
    ):
        questions.append(
            f"replay gives the recorded counts in only {m.gate.share:.1%} of {m.gate.steps} steps and no known runtime fault "
            "explains it: capture draft_states and fc_output, and compare the engine's loaded weights with the checkpoint's"
        )
    return questions + ([] if findings else [*_gaps(examination), *_poor(examination)])


def _no_gate(examination: Examination) -> str:
    """What would let replay be held against the engine."""
    serve = examination.case.serve
    if examination.counted is None:
        if serve is not None and serve.steps_cut:
            return beyond(serve.steps_cut, serve.cut_at)
        return "record verify steps in the capture"
    if examination.ladder is None:
        return "the capture has its verify steps, replay needs the draft (--draft)"
    return "the draft could not be replayed"


def _poor(examination: Examination) -> list[str]:
    """A draft that accepts next to nothing, of which nobody knows whether it was ever better."""
    rungs = examination.rungs
    shares = [rung.joint[0] for rung in rungs.values() if rung.joint and rung.rounds]
    if "trained" in rungs or not shares or max(shares) >= POOR:
        return []
    return [f"the draft accepts no more than {max(shares):.0%} at the first position, whatever states it is given here, and "
            "nothing shows that it was ever better: a draft of another target, or one that hardly learned, looks so; give states "
            "that it was trained on (--train)"]


def misrecorded(m: Measurements) -> bool:
    """Whether the engine's `fc` gave out what the reference states give and not what the recorded ones do."""
    stages = m.stages
    if stages is None or stages.fc_error is None or stages.fc_error_reference is None:
        return False
    return stages.fc_error > OTHER and stages.fc_error_reference < SAME


def _other_map(m: Measurements) -> bool:
    """Whether the engine served with a map that the checkpoint given here has lost."""
    return m.stages is not None and m.stages.head_agreement.get("rebuilt", 0.0) > SOUND


def _sound(placed: Placed) -> bool:
    return explained(placed) and (placed.share is None or placed.share >= SOUND)


def _gaps(examination: Examination) -> list[str]:
    """Clear drops between neighbouring known rungs that no finding explains, with all that each spans.

    Where the gate passes, the recorded counts are the replay's; what is left between them is which steps were counted.
    """
    rungs, gate = dict(examination.rungs), examination.m.gate
    if gate is not None and gate.passed and examination.case.inputs.metrics is None:
        rungs.pop("measured", None)
    if examination.m.runtime is not None and examination.m.runtime.drawn:
        rungs.pop("measured", None)  # of drawn drafts, where replay has the draft's best
    if examination.m.sampler is not None:
        rungs.pop("trained", None)  # of greedy text, which a draft guesses better than drawn text
    known = [name for name in SPANS if rungs.get(name) is not None and rungs[name].length is not None]
    gaps = []
    for upper, lower in itertools.pairwise(known):
        above, below = rungs[upper], rungs[lower]
        if lower == "measured" and gate is not None and gate.passed and examination.counted is not None:
            above = examination.counted  # the same steps as replay's, the last, incomplete ones included
        drop = (above.length or 0) - (below.length or 0)
        # Another text, and training text at that, accepts otherwise without a fault.
        slack = 0.25 * (above.length or 0) if upper == "trained" else UNPAIRED
        same = paired(examination, upper, lower)
        fell = drop > slack and _below(below, above) if same is None or same.interval is None else same.interval[1] < -NOTICEABLE
        if above.k == below.k and fell:
            order = list(SPANS)
            spans = ", ".join(SPANS[name] for name in order[order.index(upper) + 1 : order.index(lower) + 1])
            gaps.append(
                f"accept length falls from {above.length:.2f} ({upper}) to {below.length:.2f} ({lower}) unexplained; it spans "
                f"{spans}" + (UNSEEN if upper == "trained" and above.held_out is False else "")
            )
    return gaps
