"""metric: a figure of acceptance that counts something else than what it is read as, or that counts nothing real."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftscope.engines.counted import Counters
from draftscope.engines.settings import Distortion
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements, RungFacts
from draftscope.faults.plant import Plant, Reported
from draftscope.findings import Evidence, Fix
from draftscope.text import visible

NEAR = 0.02
"""How far a figure may be off the one recomputed: two decimals, and a last step more or less."""
STEPS = 50
"""Recorded steps from which definitions can be told apart."""


class Metric(Fault):
    """Simulated acceptance, lossy acceptance, the bonus left out, joint taken for conditional."""

    id = "metric"
    title = "a number misread"
    verdict = "measurement"
    variants = ("simulated", "bonus left out", "conditional as joint")
    page = Page(
        symptom="Two figures for one server disagree, or acceptance is the same whatever is served.",
        traces={
            "simulated": Trace("the engine runs with simulated acceptance, left over from a benchmark", "--metrics",
                               "the setting in the server's own arguments, or counts of two neighbouring values only",
                               "measured"),
            "bonus left out": Trace("accept length is told without the bonus token", "--serve, --metrics",
                                    "recomputed from the recorded counts, one definition alone gives the figure", "measured"),
            "conditional as joint": Trace("acceptance per position is of the steps that got so far, not of all",
                                          "--serve, --metrics", "as above, per position", "measured"),
        },
        lookalikes={
            "sampler": "acceptance recounted from the recorded steps is the engine's own there; here it is not",
            "draft-kv": "the recorded counts themselves fall; here only the figure made of them differs",
        },
        unseen={
            "only the last step counted, tokens after a rejection counted": "an engine of a known release is asked by its own "
            "definition (engines/definitions.py); a figure from an unknown tool needs recorded steps beside it",
            "trees against chains": "named in `next` as figures that cannot be compared, not as a fault",
        },
        reports=("SafeAILab/EAGLE issue #191", "SafeAILab/EAGLE issue #95", "vLLM PR #16035", "vLLM issue #9565"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        if m.counters is None:
            return []
        found = [_distorted(d) for d in m.counters.distortions]
        if not m.counters.simulated and m.counters.too_regular():
            found.append(_regular(m.counters))
        recorded = m.rungs.get("measured")
        if recorded is not None and recorded.length is not None and m.recorded_steps >= STEPS:
            found += _misread(m.counters, recorded, m.recorded_steps)
        return found

    def why_not(self, m: Measurements) -> str:
        if m.counters is None:
            return "no counters were given (--metrics)"
        if m.recorded_steps < STEPS:
            return (f"the counters carry no setting that makes counts up; with {m.recorded_steps} recorded steps (of {STEPS} "
                    "needed) their definitions could not be recomputed")
        return f"the counters carry no setting that makes counts up, and agree with {m.recorded_steps} recorded steps"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"metric has no variant {variant!r}")
        return replace(plant, reported=cast(Reported, variant))


def _distorted(setting: Distortion) -> Suspicion:
    says = f"{setting.key} is {visible(setting.value, 40)}: {setting.says}"
    what = "made up, whatever the draft does" if setting.simulated else "those of a lossy verification"
    return Suspicion(
        fault=Metric.id, side="serve", where=[f"config {setting.key}"], says=says,
        strength="proven" if setting.simulated else "supported",
        evidence=[Evidence(
            hypothesis=f"the accepted counts are {what}", prediction=f"healthy: {setting.key} is not set, or at its default",
            measurement=f"the server's own arguments in {visible(setting.where, 200)}",
            result=f"{setting.key} = {visible(setting.value, 40)}",
            decides=f"metric, by what the engine does with it ({setting.source})",
            figures={"key": setting.key, "value": setting.value})],
        fix=Fix(says=setting.undo[0].upper() + setting.undo[1:] + "."), recovery="needs-serving",
        caveats=["a capture from the same server holds simulated accepted counts too"] if setting.simulated else [
            "the accept length is higher than exact verification gives, and not comparable with a replay"])


def _regular(counters: Counters) -> Suspicion:
    return Suspicion(
        fault=Metric.id, side="serve", where=["counters"],
        says="every verify step accepted one of two neighbouring counts: as simulated acceptance does, and no draft",
        strength="suspected",
        evidence=[Evidence(
            hypothesis="the accepted counts are made up, whatever the draft does",
            prediction="healthy: some steps reject the first draft, some accept more than most",
            measurement="steps that accepted each position", result=f"{list(counters.accepted)} of {counters.drafts} steps",
            decides="metric, if the server runs with SGLANG_SIMULATE_ACC_LEN, or vLLM's with a synthetic rejection_sample_method",
            figures={"steps": counters.drafts, "accepted_per_position": list(counters.accepted)})],
        fix=Fix(says="Look for SGLANG_SIMULATE_ACC_LEN in the server's environment and for a synthetic rejection_sample_method "
                     "in its arguments; unset them and measure again."),
        recovery="needs-serving")


def _misread(counters: Counters, recorded: RungFacts, steps: int) -> list[Suspicion]:
    """Figures of unknown definition recomputed from the recorded counts, under every definition known."""
    found = []
    joint, length = list(recorded.joint), recorded.length or 0.0
    conditional = [j / before if before else 0.0 for j, before in zip(joint, [1.0, *joint], strict=False)]
    for key, values in counters.unknown:
        if key == "accept_length":
            meanings = {"bonus counted": [length], "the bonus token left out": [length - 1]}
        elif key == "per_position":
            meanings = {"joint (of all steps)": joint,
                        "conditional (of the steps that accepted the position before)": conditional}
        else:
            k = max(1, len(joint))
            meanings = {"accepted drafts / drafts": [(length - 1) / k],
                        "tokens with the bonus / draft tokens with the root": [length / (k + 1)]}
        names = list(meanings)
        fitting = [name for name, own in meanings.items() if _equal(values, own)]
        if len(fitting) != 1 or fitting[0] == names[0]:
            continue
        shown = {name: [round(v, 3) for v in own] for name, own in meanings.items()}
        given = ", ".join(f"{v:.3g}" for v in values[:16])
        found.append(Suspicion(
            fault=Metric.id, side="serve", where=[f"figure {key}"],
            says=f"{key} {given} is {fitting[0]}; as we define it, it is {', '.join(f'{v:.2f}' for v in shown[names[0]])}",
            strength="proven",
            evidence=[Evidence(
                hypothesis=f"{key} counts something else than it is read as", prediction=f"healthy: it is {names[0]}",
                measurement=f"recomputed from the accepted counts of {steps} recorded steps, under each definition",
                result=f"given {given}; " + "; ".join(f"{name}: {', '.join(map(str, own))}" for name, own in shown.items()),
                decides="metric, where one definition alone gives the figure", figures={"given": list(values), **shown})],
            fix=Fix(says=f"Read {key} as {fitting[0]}, or count again: accept length is tokens per verify step with the bonus, "
                         "acceptance per position is of all steps."),
            recovery="needs-serving"))
    return found


def _equal(given: tuple[float, ...], own: list[float]) -> bool:
    return len(given) == len(own) and all(abs(a - b) <= NEAR for a, b in zip(given, own, strict=True))
