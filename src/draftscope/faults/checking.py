"""What the faults of a checkpoint and its loading share: findings of one piece of evidence, and readings in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftscope.faults.base import Suspicion, Undo
from draftscope.faults.facts_checkpoint import Explained, Learned, Otherwise
from draftscope.faults.measurements import CLEARLY, Measurements
from draftscope.findings import Evidence, Fix, Patch, Recovery, Strength

ALONE = 3.0
"""By how much the second-best reading has to be worse for the best one to be the only explanation."""
HALF = 0.5
"""Share of the gain that the second-best reading of the file may bring at most."""
CONSISTENT = 0.95
"""Share of the engine's drafts that one map has to give to be the engine's."""
AT_CHANCE = 0.35
"""First-position acceptance on training states up to which a draft does badly there."""


def told(
    fault: str, where: Sequence[str], says: str, strength: Strength, *, hypothesis: str, prediction: str, measurement: str,
    result: str, decides: str, fix: str, recovery: Recovery, undo: Undo | None = None, runtime: bool = False,
    patch: Patch | None = None, config: Mapping[str, dict[str, Any]] | None = None, figures: Mapping[str, Any] | None = None,
    caveats: Sequence[str] = (),
) -> Suspicion:
    """A suspicion of the serving side with one piece of evidence."""
    return Suspicion(
        fault=fault, side="serve", where=list(where), says=says, strength=strength,
        evidence=[Evidence(hypothesis=hypothesis, prediction=prediction, measurement=measurement, result=result, decides=decides,
                           figures=dict(figures or {}))],
        fix=Fix(says=fix, config=dict(config or {}), patch=patch), recovery=recovery, undo=undo, runtime=runtime,
        caveats=list(caveats),
    )


def in_engine(
    fault: str, found: Explained, where: Sequence[str], says: str, fix: str, *, undo: Undo | None = None,
    config: Mapping[str, dict[str, Any]] | None = None, caveats: Sequence[str] = (),
) -> Suspicion:
    """A stage of the engine's draft that only another reading of the checkpoint reproduces."""
    alone = found.next_best is None or found.next_best > max(ALONE * found.other, found.own / ALONE)
    unit = "of the drafts differ" if found.part == "head" else "relative error"
    second = "" if found.next_best is None else f", {found.next_best:.2g} under the next best of {found.tried} tried"
    return told(
        fault, where, says, "proven" if alone else "supported",
        hypothesis="the engine does not run the draft as the checkpoint means it",
        prediction="each stage, run offline on what the engine recorded before it, gives what the engine recorded after it",
        measurement=f"{found.part} over what was recorded before it, under the checkpoint's own reading and under others",
        result=f"{found.own:.2g} {unit} as the checkpoint says, {found.other:.2g} with {found.key}{second}",
        decides=f"{fault} if only that reading gives what the engine gave",
        fix=fix, recovery="replayed", undo=undo or Undo(loading=True), runtime=True, config=config,
        figures={"part": found.part, "own": found.own, "other": found.other, "next_best": found.next_best, "reading": found.key},
        caveats=caveats if alone else [*caveats, "another reading explains it nearly as well"],
    )


def in_file(
    fault: str, found: Otherwise, where: Sequence[str], says: str, fix: str, *, undo: Undo, patch: Patch | None = None,
    config: Mapping[str, dict[str, Any]] | None = None,
) -> Suspicion:
    """The file read otherwise makes a draft that fails on its own training states one that does not."""
    alone = found.next_best is None or found.next_best < HALF
    return told(
        fault, where, says, "proven" if alone and found.own - found.other > CLEARLY else "supported",
        hypothesis="the file does not say what the draft was trained as", prediction="a draft does well on its training states",
        measurement=f"the draft replayed on its training states, as the file says and with {found.tried} other readings",
        result=f"-log p {found.own:.2f} and {found.own_first:.0%} at the first position as it stands, {found.other:.2f} and "
               f"{found.other_first:.0%} with {found.key}",
        decides=f"{fault} if only that reading does well", fix=fix, recovery="replayed", undo=undo, patch=patch, config=config,
        figures={"own": found.own, "other": found.other, "own_length": found.own_length, "other_length": found.other_length,
                 "reading": found.key, "next_best": found.next_best},
        caveats=[] if alone else ["another reading does nearly as well"],
    )


def spoilt(m: Measurements) -> bool:
    """Whether the file, and not too little training, is why the draft fails on its training states."""
    facts = m.checkpoint
    if facts is None:
        return False
    learned = facts.learned.get("trained")
    apart = facts.apart
    return (
        facts.otherwise is not None or (learned is not None and other_map(learned)) or untrained(m)
        or any(how == "codes" for how in facts.grids.values()) or cut_from_target(m) or short_vocabulary(m)
        or (apart is not None and apart.own is not None and apart.source is not None and apart.own - apart.source > CLEARLY)
    )


def other_map(learned: Learned) -> bool:
    """Whether draft ids stand for other tokens than the stored map says, as far as one map can tell."""
    return learned.learned - max(learned.stored, learned.common) > 0.2 and learned.stored < learned.learned / 2


def engine_map(learned: Learned) -> bool:
    """Whether each draft id always became one token in the engine, and not the map's."""
    return other_map(learned) and learned.learned > CONSISTENT


def untrained(m: Measurements) -> bool:
    """Whether every norm is exactly 1 and nearly every matrix as an initialiser leaves it."""
    facts = m.checkpoint
    return (facts is not None and facts.norms > 0 and len(facts.ones) == facts.norms and facts.matrices > 0
            and len(facts.drawn) >= 0.8 * facts.matrices)


def eagle_mode(m: Measurements) -> bool:
    """Whether a draft of several slots receives one: the target's last state, as an engine in EAGLE mode hands it over."""
    if m.serve is None or m.layers is None or m.shapes.get("serve") != 1 or m.shapes.get("draft", 1) < 2:
        return False
    return len(m.serve.slots) == 1 and m.serve.slots[0].boundary == m.layers


def trained_badly(m: Measurements) -> bool:
    """Whether the draft fails on states that it learned from, as far as they are at hand."""
    rung = m.in_sample or m.rungs.get("trained")
    return rung is not None and bool(rung.joint) and rung.joint[0] < AT_CHANCE


def cut_from_target(m: Measurements) -> bool:
    """Whether the head's rows are the target's at the draft's own ids although the draft was trained with others.

    Training that moved the rest moved every norm; where norms are still 1 there was little of it, and the head is where it began.
    """
    facts = m.checkpoint
    return facts is not None and facts.head_rows.get("offset", 0.0) > 0.9 and not facts.ones and trained_badly(m)


def short_vocabulary(m: Measurements) -> bool:
    """Whether the draft's vocabulary is the first ids, and names far less of the text than the best of its size would."""
    facts = m.checkpoint
    return (facts is not None and facts.first_ids and facts.covered is not None and facts.coverable is not None
            and facts.coverable - facts.covered > 0.1)
