"""Cases run and diagnosed, one line of JSON kept of each outcome, so that what is done is never done again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from draftscope import stopping
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.drilling.cases import Case
from draftscope.drilling.exercised import Pair
from draftscope.drilling.report import Named, Outcome
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.findings import Diagnosis
from draftscope.states.leftover import scratch
from draftscope.target.model import Target

LINES, HEAD = "outcomes.jsonl", "pair.json"
NAMES = {"heldout": "train_heldout"}
"""Files of a run whose input has another name."""


def inputs_of(run: Run, plant: Plant, target: Target, *, counted: bool = False, max_tokens: int | None = None) -> Inputs:
    """Everything that a run left, handed over under the inputs' own names; the engine's counts where spoilt, or where asked."""
    known = {field.name for field in fields(Inputs)}
    left: dict[str, Any] = {NAMES.get(field.name, field.name): getattr(run, field.name) for field in fields(run)}
    given = {name: value for name, value in left.items() if name in known and value is not None}
    if not counted and plant.reported == "counts":
        del given["metrics"]
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    return Inputs(target=target.folder, loaded=target, **given)


class Store:
    """The outcomes of one pair in a folder: one line each, appended as they come.

    Raises:
        UsageError: the folder holds outcomes of another pair.
    """

    def __init__(self, folder: Path, pair: str = "", digest: str = "") -> None:
        self.path = folder / LINES
        folder.mkdir(parents=True, exist_ok=True)
        head, mine = folder / HEAD, {"pair": pair, "digest": digest}
        if not head.exists():
            head.write_text(json.dumps(mine) + "\n")
        elif json.loads(head.read_text()) != mine:
            raise UsageError("holds outcomes of another pair, or of other prompts", where=str(folder),
                             remedy="Give another folder with --out, or remove this one")

    def add(self, outcome: Outcome) -> None:
        line = outcome.model_dump_json() + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes kept in a folder (and in its shards' folders), the last of each case; a line cut short is passed over."""
    found: dict[tuple[str, str, int | None], Outcome] = {}
    for path in sorted([*folder.glob(LINES), *folder.glob(f"*/{LINES}")]):
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                outcome = Outcome.model_validate_json(line)
            except ValueError:
                continue
            found[outcome.pair, outcome.key, outcome.tokens] = outcome
    return list(found.values())


def exercise(
    pair: Pair, cases: Iterable[Case], tokens: Sequence[int | None], folder: Path,
    on_outcome: Callable[[Outcome], None] = lambda _: None, minutes: float | None = None,
) -> None:
    """Run what is not kept in the folder yet, and keep each outcome at once.

    Args:
        minutes: no case is begun after so many; None = all are.

    A case that crashes is an outcome with its error; a wish to stop ends the exercise with everything done so far kept.
    """
    store = Store(folder, pair.name, pair.digest)
    done = {(o.key, o.tokens) for o in read_outcomes(folder)}
    began = time.monotonic()
    with scratch(folder, "drill") as work:
        for case in cases:
            left = [n for n in tokens if (case.key, n) not in done]
            if not left:
                continue
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
            done |= {(case.key, n) for n in left}
            for outcome in _case(pair, case, left, work):
                store.add(outcome)
                on_outcome(outcome)


def _case(pair: Pair, case: Case, tokens: Sequence[int | None], work: Path) -> Iterable[Outcome]:
    """The outcomes of one run, one for each amount of data."""
    began, out = time.monotonic(), work / "run"
    shutil.rmtree(out, ignore_errors=True)
    try:
        if case.broken is not None:
            raise case.broken
        run = pair.rig(case.setting, work).run(case.plant, out)
    except Exception as error:
        stopping.heed()
        for n in tokens:
            yield _of(case, pair, n, time.monotonic() - began, error=f"{type(error).__name__}: {_plain(error, work)}")
        return
    made = (time.monotonic() - began) / len(tokens)
    for n in tokens:
        began = time.monotonic()
        try:
            found = diagnose(inputs_of(run, case.plant, pair.target, counted=case.setting.counted, max_tokens=n))
        except DraftscopeError as error:
            # A refusal is an answer: the files contradict each other, and it says how.
            yield _of(case, pair, n, made + time.monotonic() - began, refused=_plain(error, work))
        except Exception as error:
            stopping.heed()
            yield _of(case, pair, n, made + time.monotonic() - began, error=f"{type(error).__name__}: {_plain(error, work)}")
        else:
            yield judge(case, pair.name, n, found, made + time.monotonic() - began)


def _plain(error: Exception, work: Path) -> str:
    """Without the temporary folder's path, which says nothing to whoever reads the outcome elsewhere."""
    return str(error).replace(f"{work}/", "")[:400]


def _of(
    case: Case, pair: Pair, tokens: int | None, seconds: float, *, error: str | None = None, refused: str | None = None,
) -> Outcome:
    return Outcome(
        key=case.key, pair=pair.name, kind=case.kind, planted=list(case.planted), setting=case.setting.says(), tokens=tokens,
        verdict=None if refused is None else "undecided", said=[] if refused is None else [f"refused: {refused}"], error=error,
        seconds=round(seconds, 3),
    )


def judge(case: Case, pair: str, tokens: int | None, found: Diagnosis, seconds: float) -> Outcome:
    """A diagnosis held against what was planted."""
    right = case.right
    named = [
        Named(fault=f.fault, strength=f.strength, right=f.fault in right, where=f.where,
              loss=None if f.acceptance is None else f.acceptance.gain)
        for f in found.findings
    ]
    planted = {p.fault for p in case.planted}
    first = found.findings[0] if found.findings else None
    effect = None if first is None else first.acceptance
    return Outcome(
        key=case.key, pair=pair, kind=case.kind, planted=list(case.planted), setting=case.setting.says(), tokens=tokens,
        rows={k: v for k, v in (found.power.get("rows") or {}).items() if isinstance(v, int)}, verdict=found.verdict,
        findings=named, first_right=(first.fault in planted) if first is not None and planted else first is None and not planted,
        both=planted <= {n.fault for n in named},
        wrong_proven=sorted({n.fault for n in named if n.strength == "proven" and not n.right}),
        length_now=None if effect is None else effect.length_now,
        length_if_fixed=None if effect is None else effect.length_if_fixed,
        said=[] if first is not None else found.next[:4], seconds=round(seconds, 3),
    )
