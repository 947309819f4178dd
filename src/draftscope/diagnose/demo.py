"""The case, replayed on a healthy pair: measured, broken, diagnosed, mended, measured again. Nothing in it knows the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from draftscope.consumers import ask
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.eagle3.generated import Summary
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig, Run
from draftscope.findings import Diagnosis


@dataclass(slots=True)
class Told:
    """The story's figures.

    Attributes:
        mended: None where the fix takes retraining.
        found: the planted fault is the first finding.
    """

    planted: str
    variant: str
    healthy: Summary
    broken: Summary
    run: Run
    diagnosis: Diagnosis
    mended: Summary | None
    found: bool


def case_labels(boundaries: tuple[int, ...]) -> tuple[str, ...]:
    """Labels as the case's file had them: the embedding claimed in front, every other entry one place too early."""
    return ("embed", *(f"layer {b}" for b in boundaries))


def tell(rig: Rig, boundaries: tuple[int, ...], fault_id: str, out: Path, report: Callable[[str], None]) -> Told:
    """Plant a fault in a healthy pair, and find it from the files alone.

    Args:
        out: an empty folder; the healthy, broken and mended runs go into it.
    """
    planted = fault(fault_id)
    variant = planted.variants[0]
    healthy_plant = replace(Plant.healthy(boundaries, rig.theta), labels=case_labels(boundaries))
    report("serving the healthy pair")
    rig.write_checkpoint(healthy_plant, out / "healthy" / "draft")
    healthy = rig.serve(healthy_plant, out / "healthy" / "draft", out / "healthy" / "capture")
    plant = planted.make(healthy_plant, variant)
    report(f"planting {fault_id} ({variant}) and serving again")
    run = rig.run(plant, out / "broken")
    report("diagnosing, from the files alone")
    found = diagnose(
        Inputs(train=run.train, serve=run.serve, draft=run.draft, target=rig.target.folder, metrics=run.metrics,
               train_heldout=run.heldout, logs=run.logs, conversations=run.conversations), report
    )
    first = found.findings[0].fault if found.findings else None
    mended = None
    if first is not None:
        repaired = fault(first).mend(plant, _boundaries(found, boundaries))
        if repaired is not None:
            report("applying the fix and serving once more")
            rig.write_checkpoint(repaired, out / "mended" / "draft")
            mended = rig.serve(repaired, out / "mended" / "draft", out / "mended" / "capture")
    return Told(fault_id, variant, healthy, run.summary, run, found, mended, first == fault_id)


def _boundaries(found: Diagnosis, default: tuple[int, ...]) -> tuple[int, ...]:
    """The boundaries that the first finding's fix names."""
    config = found.findings[0].fix.config.get(ask("vllm").known.id, {})
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if ids else default
