"""The repair of served states folded into a copy of the draft, for an engine that cannot be changed.

What is folded is what a matrix can do to a row: an order, factors, a map, and for states of another boundary a matrix fitted on
half of the sequences. Acceptance before and after is replayed on the other half, on the copy as it was written, its rounding
included; what does not help there beyond its interval is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Several
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftscope.compare.pairing import pair
from draftscope.diagnose.ladder import Repair, combine
from draftscope.diagnose.sides import HALVES_FROM, choosing, judging
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.copying import check_new, rounding, whole_folder, write_copy
from draftscope.eagle3.folding import Fitted, Folded, Linear, fit, fold
from draftscope.eagle3.model import Draft
from draftscope.eagle3.replayed import compare
from draftscope.errors import UsageError
from draftscope.faults.base import Suspicion, Undo
from draftscope.faults.changes import Own, Scale, Shift, TurnBack
from draftscope.findings import Absorbed
from draftscope.states.places import Remote

if TYPE_CHECKING:
    from draftscope.diagnose.case import Inputs
    from draftscope.diagnose.run import Examination

SIDECAR = "absorbed.json"
MOST_ROWS = 8192
"""Rows that a matrix is fitted on."""
SOUND = 0.9
"""Share of a slot's rows that must hold what the fault says: one matrix acts on all of them."""
NOT_LINEAR = {
    "token-shift": "the rows hold the states of other tokens, and nothing in a row gives back those of its own",
    "target-quant": "the target runs in another precision, which no matrix takes back",
    "req-mix": "the rows are of other requests, and nothing in a row gives back its own",
    "final-norm": "every row was divided by its own length, and no matrix knows what that was",
    "nonfinite": "what is not finite holds nothing",
    "schema-width": "the rows have another shape than fc takes",
}


class Refused(Exception):
    """Why nothing is folded."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be folded.

    Attributes:
        faults: the suspicions whose undoing it is.
        repair: that undoing, of the states.
        linear: the part of it that is exact.
        reference: slots (after the order) that hold another state, for which a matrix is fitted.
        origins: for each slot, the recorded slot that the fit starts from.
    """

    faults: list[Suspicion]
    repair: Repair
    linear: Linear
    reference: frozenset[int]
    origins: tuple[int, ...]


def check_folder(inputs: Inputs) -> None:
    """Raise UsageError, before any work, where the copy could not be made or would get among the inputs."""
    out = inputs.absorb
    if out is None:
        return
    if inputs.draft is None or inputs.serve is None:
        raise UsageError("--absorb folds what is wrong with the served states into the draft",
                         remedy="Give both: --serve and --draft")
    check_copy(out, inputs)


def check_copy(out: Path, inputs: Inputs) -> None:
    """Raise UsageError where a copy of the draft could not be made, or would lie among the inputs."""
    check_new(out)
    for given in (inputs.draft, inputs.source_draft, inputs.serve, inputs.train, inputs.train_heldout, inputs.target,
                  inputs.sweep):
        if given is None or isinstance(given, Remote):
            continue
        own, wanted = given.resolve(), out.resolve()
        if wanted == own or own in wanted.parents:
            raise UsageError("lies among what is read", where=str(out), remedy="Name a folder outside of the inputs")


def absorb(examination: Examination, out: Path) -> Absorbed:
    """Fold the repair of the served states into a copy of the draft at `out`; nothing is written where that does not help.

    Raises:
        DraftscopeError: the copy can't be written.
    """
    try:
        return _absorb(examination, out)
    except Refused as refused:
        return Absorbed(says=f"nothing was written: {refused}")


def _absorb(examination: Examination, out: Path) -> Absorbed:
    case, ladder = examination.case, examination.ladder
    if case.checkpoint is None or case.serve is None or ladder is None or "served" not in examination.rungs:
        raise Refused("the draft was not replayed over the served states, so that nothing says whether it would help")
    names = [s.name for s in case.serve.sequences]
    # A map is fitted on the sequences on which repairs are chosen; of few, none is kept from it.
    apart = len(names) >= HALVES_FROM
    seen, unseen = (set(choosing(names)), judging(names)) if apart else (set(names[::2]), names[1::2])
    draft = ladder.draft(examination.as_read)
    if not draft.config.use_aux_hidden_state:
        raise Refused("this draft has no fc")
    if "fc.weight" not in case.checkpoint.tensors or any("fc.".startswith(lost) for lost in examination.as_read.lost):
        raise Refused("the checkpoint's fc is not what serves")
    plan = _plan(examination)
    folded = fold(draft, plan.linear if not plan.reference else replace(plan.linear, order=plan.origins))
    fitted = _fitted(examination, draft, plan, folded, seen) if plan.reference or folded.why_not else None
    tensors = folded.tensors | ({} if fitted is None else {"fc.weight": fitted.weight})
    if all(torch.equal(tensor, _own(draft, name)) for name, tensor in tensors.items()):
        raise Refused("the norms before fc take it out: there is nothing to fold")
    dtype = case.checkpoint.tensors["fc.weight"].dtype
    before = ladder.served(combine([], examination.as_read)).only(unseen)
    with whole_folder(out) as (folder, keep):
        left = write_copy(case.checkpoint, tensors, folder)
        copy = build_draft(load_checkpoint(folder, target_layers=case.layers), case.parts, examination.as_read)
        after = ladder.with_draft(copy, unseen)
        gain, _ = compare(before, after, before.readout, seed=case.inputs.seed)
        was, now = before.rung(seed=case.inputs.seed), after.rung(before.readout, seed=case.inputs.seed)
        whole = _whole(examination, plan, unseen)
        found = Absorbed(
            says="", faults=[s.fault for s in plan.faults], exact=fitted is None, why_not_exact=_why(plan, folded),
            k=case.k, readout=was.readout, length_before=was.length, length_after=now.length, length_if_fixed=whole,
            gain=gain.value, gain_interval=gain.interval, sequences=gain.sequences,
            fit=None if fitted is None else {
                "rows": fitted.rows, "ridge": fitted.strength, "error_before": fitted.before, "error": fitted.error},
            dtype=str(dtype).removeprefix("torch."), rounding=rounding(tensors["fc.weight"], dtype),
            changed=sorted(case.checkpoint.spelt[name] for name in tensors), left=left,
        )
        found.says = _judged(found, out, apart=apart)
        if gain.interval is None or gain.interval[0] <= 0:
            return found
        found.folder = str(out)
        sidecar = {"schema": "draftscope.absorbed/1", "source": str(case.checkpoint.folder),
                   "findings": [s.says for s in plan.faults], **found.model_dump(exclude={"folder"}),
                   "provenance": examination.provenance()}
        (folder / SIDECAR).write_text(json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        keep()
    return found


def _plan(examination: Examination) -> Plan:
    """What of the findings a matrix can take in; `Refused` where there is nothing, or what is left would spoil it."""
    m = examination.m
    faults: list[Suspicion] = []
    passed: list[str] = []
    for judged in examination.judged:
        one = judged.suspicion
        if one.strength == "suspected" or one.recording:
            passed.append(f"{one.fault}: " + ("it is the recording that is wrong" if one.recording else "it is only suspected"))
        elif one.fault in NOT_LINEAR and one.side == "serve":
            raise Refused(f"{one.fault}: {NOT_LINEAR[one.fault]}")
        elif one.side == "train":
            passed.append(f"{one.fault}: it is the training data that is wrong")
        elif one.undo is None or not _of_states(one.undo):
            passed.append(f"{one.fault}: it is no fault of the states that one matrix undoes")
        else:
            faults.append(one)
    if not faults:
        raise Refused("; ".join(passed) or "no fault of the served states was found")
    for slot in {int(w.removeprefix("slot ")) for s in faults for w in s.where if w.startswith("slot ")}:
        placed = m.serve.slots[slot] if m.serve is not None and slot < len(m.serve.slots) else None
        if placed is not None and placed.share is not None and placed.share < SOUND:
            raise Refused(f"only {placed.share:.0%} of the rows of slot {slot} hold what the finding says, and a matrix acts on "
                          "all of them")
    repair = combine([s.undo for s in faults if s.undo is not None], examination.as_read)
    own = repair.reference | {change.slot for change in repair.states if isinstance(change, Own)}
    if own:
        # Of a slot that holds another state, factor and basis are the fit's.
        repair = replace(repair, states=tuple(c for c in repair.states if isinstance(c, Own) or c.slot not in own))
    return Plan(faults, repair, _linear(examination, repair), own, _origins(examination, repair.order, own))


def _linear(examination: Examination, repair: Repair) -> Linear:
    """Factors and maps of a repair, in the order in which replay applies them: maps first."""
    ladder = examination.ladder
    assert ladder is not None
    if any(isinstance(change, TurnBack) for change in repair.states) and not ladder.can_remake:
        raise Refused("the map is fitted against the target's own states: give its weights (--target)")
    width = 0 if examination.case.checkpoint is None else examination.case.checkpoint.config.target_hidden_size
    scale: dict[int, float] = {}
    maps: dict[int, Tensor] = {}
    for change in repair.states:
        if isinstance(change, TurnBack):
            found = ladder.turn(change)
            if found is None:
                raise Refused(f"too few rows tell the map of slot {change.slot}")
            maps[change.slot] = (found[0].T / found[1]) @ maps.get(change.slot, torch.eye(width, dtype=torch.float64))
        elif isinstance(change, Scale) and change.channels is None:
            scale[change.slot] = scale.get(change.slot, 1.0) * change.factor
        elif isinstance(change, Scale) and change.channels is not None:
            factors = torch.ones(width, dtype=torch.float64)
            first, last = change.channels
            factors[first:last] = change.factor
            maps[change.slot] = maps.get(change.slot, torch.eye(width, dtype=torch.float64)) * factors
    return Linear(order=repair.order, scale=scale, maps=maps)


def _of_states(undo: Undo) -> bool:
    """Whether it changes the states alone, and those row by row and alike in all rows."""
    alike = all(change.phase is None and not isinstance(change, Shift) and not (isinstance(change, Own) and change.lag)
                for change in undo.states)
    return alike and undo != Undo() and replace(undo, reference=frozenset(), order=(), states=()) == Undo()


def _origins(examination: Examination, order: tuple[int, ...], reference: frozenset[int]) -> tuple[int, ...]:
    """The recorded slot that is nearest to what each slot should hold, by boundary: where the fit starts."""
    m = examination.m
    held = [] if m.serve is None else m.serve.slots
    wanted = m.reference or ()
    origins = list(order or range(m.shapes["draft"]))
    for slot in reference:
        want = wanted[slot].boundary if slot < len(wanted) else None
        whole = [p for p in held if p.boundary is not None and p.kind == "stream" and not p.lag]
        if want is not None and whole:
            origins[slot] = min(whole, key=lambda p: (abs((p.boundary or 0) - want), p.slot != slot)).slot
    return tuple(origins)


def _fitted(examination: Examination, draft: Draft, plan: Plan, folded: Folded, seen: set[str]) -> Fitted:
    """`fc` fitted on the sequences `seen`: from what comes, behind the norms of the copy, to the output over what is right."""
    copy = deepcopy(draft)
    with torch.no_grad():
        for name, tensor in folded.tensors.items():
            copy.get_parameter(name).copy_(tensor)
        inputs, outputs = [], []
        for broken, right in _rows(examination, plan, seen):
            inputs.append(copy.fc_input(broken.float()))
            outputs.append(draft.fc_input(right.float()) @ _own(draft, "fc.weight").T)
    if sum(len(rows) for rows in inputs) < 2:
        raise Refused("the states that the slots should hold are not at hand: give the target (--target), or training states of "
                      "texts that the capture has too (--train)")
    most = max(1, MOST_ROWS // len(inputs))
    inputs, outputs = ([rows[:: -(-len(rows) // most) or 1] for rows in part] for part in (inputs, outputs))
    try:
        return fit(_own(copy, "fc.weight"), inputs, outputs)
    except ValueError as error:
        raise Refused(str(error)) from None


def _rows(examination: Examination, plan: Plan, seen: set[str]) -> Several[tuple[Tensor, Tensor]]:
    """By sequence: rows as served and as they should be, [N, S, Ht] each; from the target, else from paired training rows."""
    case, ladder = examination.case, examination.ladder
    assert case.serve is not None and ladder is not None
    served = {s.name: s for s in case.serve.sequences if s.name in seen}
    if not plan.reference or ladder.can_remake:
        return [(served[s.name].features, s.features) for s in ladder.repaired(plan.repair, seen)]
    if case.train is None or examination.m.shapes.get("train") != examination.m.shapes.get("draft"):
        return []
    return [(p.serve.features[p.start : p.stop], p.train.features[p.start : p.stop])
            for p in pair(case.train.sequences, served.values()).pairs]


def _whole(examination: Examination, plan: Plan, names: list[str]) -> float | None:
    """Accept length with the states themselves repaired, where that can be replayed."""
    ladder = examination.ladder
    assert ladder is not None
    if plan.reference and not ladder.can_remake:
        return None
    return ladder.served(plan.repair).only(names).rung().length


def _why(plan: Plan, folded: Folded) -> str:
    if plan.reference:
        slots = ", ".join(f"slot {i}" for i in sorted(plan.reference))
        return f"{slots}: other states can only be fitted from those that came"
    return folded.why_not


def _own(draft: Draft, name: str) -> Tensor:
    return draft.get_parameter(name).detach()


def _judged(found: Absorbed, out: Path, *, apart: bool) -> str:
    """The result in one sentence or three."""
    how = "exactly" if found.exact else "as nearly as a matrix can"
    said = (f"{', '.join(found.faults)} folded into fc {how}; accept length {_two(found.length_before)} before, "
            f"{_two(found.length_after)} after")
    if found.length_if_fixed is not None:
        said += f", {_two(found.length_if_fixed)} with the states themselves repaired"
    said += f" (replayed on {found.sequences} sequences{' that no fit has seen' if apart else ''})"
    if found.gain_interval is None:
        return f"nothing was written: {said}; that is too few for an interval: capture 16 requests or more"
    low, high = found.gain_interval
    interval = f"gain {found.gain or 0:+.2f} [{low:+.2f}, {high:+.2f}]"
    if low <= 0:
        return f"nothing was written: {said}; {interval}: it does not help beyond chance"
    return (f"written to {out}: {said}; {interval}. {found.dtype} rounds the new fc by {found.rounding or 0:.1e}. It serves this "
            "engine as it is: once the engine is repaired, serve the original again")


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
