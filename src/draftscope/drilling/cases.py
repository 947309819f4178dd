"""What is exercised: every fault alone, sampled pairs of faults, strengths that are no variant, and healthy runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from draftscope.drilling.report import CaseKind, Planted
from draftscope.drilling.strengths import OTHERS
from draftscope.errors import UsageError
from draftscope.faults import FAULTS, fault
from draftscope.faults.base import Fault
from draftscope.faults.plant import Plant

DRAWS = 20
"""Times that a strength is drawn for each one wanted: those that are a variant, or were drawn before, don't count."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run is served, apart from what is planted; None = as the pair's rig has it.

    Attributes:
        prompts: which of the pair's prompts, by number.
        counted: the engine's own counts are handed over too.
    """

    prompts: tuple[int, ...] | None = None
    max_new: int | None = None
    rows: int | None = None
    k: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    counted: bool = False

    def says(self) -> str:
        """What differs from the plain run."""
        told = [f"{len(self.prompts)} prompts"] if self.prompts is not None else []
        told += [f"{self.max_new} tokens each"] if self.max_new is not None else []
        told += [f"batches of {self.rows}"] if self.rows is not None else []
        told += [f"K = {self.k}"] if self.k is not None else []
        told += [self.dtype] if self.dtype != "float32" else []
        return ", ".join([*told, *(["with counts"] if self.counted else [])])


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made and diagnosed at several amounts of data; `broken` = the fault could not be made, and why."""

    key: str
    kind: CaseKind
    plant: Plant
    planted: tuple[Planted, ...] = ()
    setting: Setting = field(default_factory=Setting)
    broken: Exception | None = None

    @property
    def right(self) -> frozenset[str]:
        """Faults that may rightly be named: those planted, and what these say that they include."""
        ids = {p.fault for p in self.planted}
        return frozenset(ids.union(*(fault(i).includes for i in ids)) if ids else ids)


def chosen(names: Sequence[str]) -> list[tuple[Fault, str]]:
    """Faults and variants by name: `ID` for all of its variants, `ID: VARIANT` for one; all where none are named.

    Raises:
        UsageError: a name that is none.
    """
    every = [(one, variant) for one in FAULTS for variant in one.variants]
    if not names:
        return every
    found = []
    for name in names:
        some = [(one, v) for one, v in every if name in (one.id, f"{one.id}: {v}")]
        if not some:
            raise UsageError(f"no fault or variant `{name}`", remedy=f"Known: {', '.join(one.id for one in FAULTS)}")
        found += some
    return found


def plainest(which: Sequence[tuple[Fault, str]]) -> list[tuple[Fault, str]]:
    """Of every fault its first variant here, and its first on the training side."""
    found: dict[tuple[str, bool], tuple[Fault, str]] = {}
    for one, variant in which:
        found.setdefault((one.id, variant.startswith("train")), (one, variant))
    return list(found.values())


def singles(healthy: Plant, which: Sequence[tuple[Fault, str]]) -> Iterator[Case]:
    """Each fault alone."""
    for one, variant in which:
        planted = (Planted(fault=one.id, variant=variant),)
        try:
            yield Case(f"{one.id}: {variant}", "single", one.make(healthy, variant), planted)
        except Exception as error:
            yield Case(f"{one.id}: {variant}", "single", healthy, planted, broken=error)


def others(healthy: Plant, which: Sequence[tuple[Fault, str]], layers: int, each: int, seed: int) -> Iterator[Case]:
    """Faults at strengths and places that are none of their variants, `each` of every fault for which that can be drawn."""
    for name in dict.fromkeys(one.id for one, _ in which):
        if name not in OTHERS:
            continue
        draw = random.Random(f"{seed} {name}")
        seen = [healthy, *(fault(name).make(healthy, variant) for variant in fault(name).variants)]
        for _ in range(DRAWS * each):
            said, plant = OTHERS[name](healthy, draw, layers)
            if plant not in seen and len(seen) < each + 1 + len(fault(name).variants):
                seen.append(plant)
                yield Case(f"{name}: {said}", "other strength", plant, (Planted(fault=name, variant=said),))


def pairs(healthy: Plant, which: Sequence[tuple[Fault, str]], count: int, seed: int) -> list[Case]:
    """`count` pairs of two faults that can be had together, drawn evenly from the pairs of classes."""
    draw = random.Random(seed)
    by_class: dict[tuple[str, str], list[tuple[tuple[Fault, str], tuple[Fault, str]]]] = {}
    for a, b in itertools.combinations(which, 2):
        if a[0].id != b[0].id:
            by_class.setdefault((a[0].id, b[0].id), []).append((a, b))
    classes = sorted(by_class)
    draw.shuffle(classes)
    found: list[Case] = []
    for name in itertools.cycle(classes) if classes else ():
        if len(found) >= count or not any(by_class.values()):
            break
        candidates = by_class[name]
        while candidates:
            a, b = candidates.pop(draw.randrange(len(candidates)))
            both = together(healthy, a, b)
            if both is not None:
                planted = tuple(Planted(fault=one.id, variant=v) for one, v in (a, b))
                found.append(Case(" + ".join(f"{p.fault}: {p.variant}" for p in planted), "pair", both, planted))
                break
    return found


def spread_evenly(kinds: Sequence[Sequence[Case]]) -> list[Case]:
    """Cases of several kinds, each spread evenly over the whole in an order drawn by name: a budget of time cuts off some of each
    kind and of each class."""
    drawn = [sorted(kind, key=lambda case: random.Random(case.key).random()) for kind in kinds]
    placed = [((i + 0.5) / len(kind), case) for kind in drawn for i, case in enumerate(kind)]
    return [case for _, case in sorted(placed, key=lambda one: one[0])]


def together(healthy: Plant, a: tuple[Fault, str], b: tuple[Fault, str]) -> Plant | None:
    """Both planted; None where one changes what the other does, so that they are not two faults any more, or can't be made."""
    try:
        alone = [one.make(healthy, variant) for one, variant in (a, b)]
        if changed(healthy, alone[0]) & changed(healthy, alone[1]):
            return None
        first, second = b[0].make(alone[0], b[1]), a[0].make(alone[1], a[1])
    except Exception:
        return None
    return first if first == second else None


def changed(before: Any, after: Any, name: str = "") -> frozenset[str]:
    """Names of the fields, nested ones included, in which two set-ups differ."""
    if not is_dataclass(before) or type(before) is not type(after):
        return frozenset() if before == after else frozenset({name})
    inner = [changed(getattr(before, f.name), getattr(after, f.name), f"{name}.{f.name}") for f in fields(before)]
    return frozenset[str]().union(*inner)


def clean(healthy: Plant, prompts: int, count: int, seed: int) -> Iterator[Case]:
    """Healthy runs: other prompts, few and many, short and long answers, batches, K, bfloat16, with and without counts."""
    draw = random.Random(seed)
    for number in range(count):
        some = tuple(sorted(draw.sample(range(prompts), max(1, min(prompts, draw.choice([2, 4, 8, 12, prompts]))))))
        setting = Setting(
            prompts=some, max_new=draw.choice([8, 16, 48, 96]), rows=draw.choice([1, 3, 8, 16]), k=draw.choice([3, 3, 1, 2, 5]),
            dtype="bfloat16" if number % 3 == 2 else "float32", counted=draw.random() < 0.5,
        )
        yield Case(f"clean {number}: {setting.says()}", "clean", healthy, setting=setting)
