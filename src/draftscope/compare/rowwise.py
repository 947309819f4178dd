"""Row by row: what a slot holds where it does not hold, in every row, what it should."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from draftscope.compare.evidence import LAGS, Sweep, candidates_of
from draftscope.compare.runs import digest, relative
from draftscope.compare.transforms import TINY
from draftscope.states.types import Sequence

NEAR, FAR = 0.1, 0.3
"""Relative error under which a row holds a place, whatever the rounding, and over which it never does."""
CLEARLY = 0.5
"""Of its error at the wanted place, at most, that a row may be away from another."""
LOOKED_UP = 512
"""Rows of a slot that are looked for among all others."""
SHIFTED = max(map(abs, LAGS))
"""Rows within which a displacement is a shift of states against tokens."""
MOST = 0.9
RANKS = (2, 4, 8, 16)


@dataclass(slots=True)
class Row:
    """A row that is not right: where it stands, and its state."""

    sequence: int
    row: int
    verify: bool
    x: Tensor
    error: float


@dataclass(slots=True)
class Slot:
    """What is gathered of one slot, sequence by sequence."""

    wanted: int
    kinds: Counter[str] = field(default_factory=Counter)
    verify: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    offsets: Counter[int] = field(default_factory=Counter)
    moves: set[tuple[int, int, int]] = field(default_factory=set)
    later: int = 0
    steps: int = 0
    last_step: int = 0
    beside: int = 0
    whole: int = 0
    zeros: list[tuple[int, list[int]]] = field(default_factory=list)
    bad: list[Row] = field(default_factory=list)
    right: int = 0
    displaced: set[int] = field(default_factory=set)


class Rowwise:
    """Gathers, over the sequences of one side, what the rows of some slots hold.

    Args:
        wanted: slot -> the boundary that it should hold.
    """

    def __init__(self, wanted: dict[int, int]) -> None:
        self.slots = {slot: Slot(boundary) for slot, boundary in wanted.items()}
        self.names: list[str] = []
        self.states: dict[int, list[Tensor]] = defaultdict(list)  # the target's own, by boundary
        self.prompts: list[int] = []
        self.phased = True  # whether every sequence tells rows of verify steps from those of prefills

    def update(self, sequence: Sequence, swept: Sweep) -> None:
        """Take in a sequence [T rows] and the target's states over its tokens."""
        number = len(self.names)
        self.names.append(sequence.name)
        rows = sequence.rows
        self.phased &= sequence.steps is not None and sequence.answer is not None
        verify = _verify(sequence)
        self.prompts.append(int((~verify).sum()))
        for boundary in {slot.wanted for slot in self.slots.values()}:
            self.states[boundary].append(swept.stream[boundary][:rows].float())
        before = _steps_before(sequence)
        for index, slot in self.slots.items():
            self._row_kinds(slot, sequence.features[:, index].float(), swept, number, verify, before)

    def _row_kinds(self, slot: Slot, x: Tensor, swept: Sweep, number: int, verify: Tensor, before: Tensor) -> None:
        wanted = swept.stream[slot.wanted][: len(x)].float()
        error = relative(x, wanted)
        usable = x.isfinite().all(-1)
        usable[0] = False  # the first token's state is a class of its own
        zero = usable & ~x.any(-1)
        close = error[usable & (error < FAR)]
        tolerance = NEAR if not len(close) else min(max(4 * float(close.median()), NEAR), FAR)
        right = usable & ~zero & (error < tolerance)
        place = self._places(slot, x, swept, usable & ~zero, error, right)
        elsewhere = {row: name for row, (name, _) in place.items()}
        for row in right.nonzero().squeeze(-1).tolist():
            if row not in place:
                slot.kinds["right"] += 1
                slot.verify["right"] += bool(verify[row])
        for row in zero.nonzero().squeeze(-1).tolist():
            slot.kinds["zeros"] += 1
            slot.verify["zeros"] += bool(verify[row])
        if bool(zero.any()):
            slot.zeros.append((number, zero.nonzero().squeeze(-1).tolist()))
        for row, (name, later) in place.items():
            slot.kinds["another place"] += 1
            slot.verify["another place"] += bool(verify[row])
            slot.places[name] += 1
            slot.later += later
        self._alternate(slot, set(elsewhere), right, verify)
        for row in (usable & ~zero & ~right).nonzero().squeeze(-1).tolist():
            if row not in elsewhere:
                slot.bad.append(Row(number, row, bool(verify[row]), x[row], float(error[row])))
        self._last_step(slot, x, wanted, usable & ~right, before)

    def _places(self, slot: Slot, x: Tensor, swept: Sweep, rows: Tensor, error: Tensor,
                right: Tensor) -> dict[int, tuple[str, bool]]:
        """Rows that hold another place of their own token: its name, and whether it lies behind the wanted one.

        A row counted as right within a wide tolerance is another place's where it is far nearer to that.
        """
        index = rows.nonzero().squeeze(-1)
        if not len(index):
            return {}
        options = candidates_of(len(swept.stream) - 1, swept.partial is not None)
        errors = torch.stack([relative(x[index], option.rows(swept, index)) for option in options])
        best, which = errors.min(0)
        found = {}
        for at, row in enumerate(index.tolist()):
            option = options[int(which[at])]
            if option.place.index == slot.wanted and option.place.kind == "stream" and option.place.norm == "pre":
                continue
            if float(best[at]) < NEAR and float(best[at]) < CLEARLY * float(error[row]):
                partial = option.place.kind == "partial"
                later = option.place.kind != "branch" and option.place.index > slot.wanted
                found[row] = (str(option.place), later or (partial and option.place.index > slot.wanted))
        return found

    def _alternate(self, slot: Slot, other: set[int], right: Tensor, verify: Tensor) -> None:
        for phase in (verify, ~verify):
            here = set((right & phase).nonzero().squeeze(-1).tolist()) - other
            there = {row for row in other if bool(phase[row])}
            if len(here) >= 2 and len(there) >= 2:
                slot.beside += 1
                return
        if len(other) >= MOST * max(len(right) - 1, 1):
            slot.whole += 1

    def _last_step(self, slot: Slot, x: Tensor, wanted: Tensor, rows: Tensor, before: Tensor) -> None:
        index = (rows & (before >= 0)).nonzero().squeeze(-1)
        if not len(index):
            return
        slot.steps += len(index)
        held = relative(x[index], wanted[before[index]]) < NEAR
        slot.last_step += int(held.sum())
        slot.displaced |= set((before[index] - index)[held].tolist())

    def finish(self) -> None:
        """Look the rows that hold no place of their own token up among all others."""
        for slot in self.slots.values():
            self._repeated(slot)
            self._look_up(slot)

    def _repeated(self, slot: Slot) -> None:
        """Vectors that stand more than once in one sequence: a buffer that nothing wrote in between, or its padding."""
        bits: dict[bytes, list[Row]] = defaultdict(list)
        for row in slot.bad:
            bits[digest(row.x)].append(row)
        same = [row for rows in bits.values() if len({row.sequence for row in rows}) < len(rows) for row in rows]
        chosen = {id(row) for row in same}
        slot.bad = [row for row in slot.bad if id(row) not in chosen]
        slot.kinds["padding"] += len(same)
        slot.verify["padding"] += sum(row.verify for row in same)

    def _look_up(self, slot: Slot) -> None:
        some = _spread(slot.bad, LOOKED_UP)
        if not some:
            return
        pool = torch.cat(self.states[slot.wanted])
        origin = [(number, row) for number, states in enumerate(self.states[slot.wanted]) for row in range(len(states))]
        norms = pool.norm(dim=-1).clamp_min(TINY)
        weight = len(slot.bad) / len(some)
        kinds: Counter[str] = Counter()
        verify: Counter[str] = Counter()
        for row in some:
            squared = (row.x.norm() / norms).square() + 1 - 2 * (pool @ row.x) / norms.square()
            # Rows of shared prefixes are equal in several sequences: one's own first.
            own = torch.tensor([number != row.sequence for number, _ in origin])
            best = int((squared + 1e-5 * own).argmin())
            error = float(relative(row.x, pool[best]))
            number, at = origin[best]
            kind = "unknown"
            if error < NEAR and error < CLEARLY * row.error:
                kind = "same sequence" if number == row.sequence else "another sequence"
                if number == row.sequence:
                    slot.offsets[at - row.row] += 1
                    slot.moves.add((number, row.row, at))
            kinds[kind] += 1
            verify[kind] += row.verify
        for kind, count in kinds.items():
            slot.kinds[kind] += round(count * weight)
            slot.verify[kind] += round(verify[kind] * weight)

    def of_step_before(self, slot: Slot) -> int:
        """Rows that hold what the step before held in their place, and that no shift of rows against tokens explains.

        The step before lies as far back as it accepted. Where that was the same distance every time, a shift within the rows of
        a step's reach would look alike; one beyond them, in rows of verify steps alone, is no shift.
        """
        if len(slot.displaced) > 1:
            return slot.last_step
        beyond = bool(slot.displaced) and min(map(abs, slot.displaced)) > SHIFTED
        return slot.last_step if beyond and slot.verify["same sequence"] == slot.kinds["same sequence"] else 0

    def shard(self, slot: Slot) -> int | None:
        """n, where every sequence's zeros are the rows of its prompt behind the first n-th."""
        found = {n for n in RANKS if slot.zeros and all(
            rows == list(range(-(-self.prompts[number] // n), self.prompts[number])) for number, rows in slot.zeros)}
        return min(found) if found else None

    def turned(self, slot: Slot) -> int | None:
        """n, where rows of the prompts stand as n shards in reverse order would have them."""
        if len(slot.moves) < 8:
            return None
        for n in RANKS:
            orders = {number: _turned(self.prompts[number], n) for number, _, _ in slot.moves}
            if all(row < len(orders[number]) and orders[number][row] == at for number, row, at in slot.moves):
                return n
        return None


def _turned(count: int, ranks: int) -> list[int]:
    """The row that stands at each of a prompt's `count` places once its shards are joined in reverse."""
    each = -(-count // ranks)
    return [row for at in reversed(range(0, count, each)) for row in range(at, min(at + each, count))]


def _verify(sequence: Sequence) -> Tensor:
    """[T] bool: rows of verify steps, as far as recorded."""
    if sequence.steps is None or sequence.answer is None:
        return torch.zeros(sequence.rows, dtype=torch.bool)
    return sequence.answer[: sequence.rows].bool()


def _steps_before(sequence: Sequence) -> Tensor:
    """[T] for each row of a verify step the accepted row that had its place in the step before; -1 without."""
    before = torch.full((sequence.rows,), -1)
    if sequence.steps is None:
        return before
    starts = sequence.steps.start.tolist()
    ends = [*starts[2:], sequence.rows - 1]
    for (last, this), end in zip(pairwise(starts), ends, strict=False):
        count = min(this - last, min(end, sequence.rows - 1) - this)
        before[this + 1 : this + 1 + count] = torch.arange(last + 1, last + 1 + count)
    return before


def _spread(rows: list[Row], most: int) -> list[Row]:
    count = min(len(rows), most)
    return [rows[i * len(rows) // count] for i in range(count)]


def blocks_alone(states: Tensor) -> tuple[int, tuple[int | None, ...]] | None:
    """Channels [N, Ht] in n equal blocks of which some are zeros in every row, or copies of another: n, and what each holds."""
    some = states.float()[states.isfinite().all(-1) & states.any(-1)]
    if len(some) < 8:
        return None
    empty = int((~some.any(0)).sum())
    for ranks in RANKS:
        if some.shape[-1] % ranks or some.shape[-1] < 2 * ranks:
            continue
        parts = some.chunk(ranks, -1)
        holds: list[int | None] = []
        for i, part in enumerate(parts):
            same = next((j for j in range(i) if holds[j] == j and torch.equal(parts[j], part)), i)
            holds.append(None if not bool(part.any()) else same)
        if holds != list(range(ranks)) and holds.count(None) * some.shape[-1] == empty * ranks:
            return ranks, tuple(holds)
    return None


def blocks_of(x: Tensor, r: Tensor) -> tuple[int, tuple[int | None, ...], float] | None:
    """Which block of the right states r [N, Ht] each of n equal blocks of x [N, Ht] holds; None where some holds none, or all
    their own."""
    if len(x) < 8:
        return None
    for ranks in RANKS:
        if x.shape[-1] % ranks or x.shape[-1] < 2 * ranks:
            continue
        ours, theirs = x.chunk(ranks, -1), r.chunk(ranks, -1)
        holds: list[int | None] = []
        errors = []
        for part in ours:
            if not bool(part.any()):
                holds.append(None)
                continue
            away = torch.stack([relative(part, other).nan_to_num(torch.inf).median() for other in theirs])
            errors.append(float(away.min()))
            holds.append(int(away.argmin()))
        if errors and max(errors) < NEAR and holds != list(range(ranks)):
            return ranks, tuple(holds), max(errors)
    return None


def identical(sequences: Several[Sequence]) -> tuple[int, ...]:
    """Slots that hold the state of another slot, bit for bit, in nine rows of ten."""
    if not sequences:
        return ()
    slots = sequences[0].features.shape[1]
    found = set()
    for i in range(slots):
        for j in range(i + 1, slots):
            equal = torch.cat([(s.features[:, i] == s.features[:, j]).all(-1) & s.features[:, i].any(-1) for s in sequences])
            if float(equal.float().mean()) >= MOST:
                found |= {i, j}
    return tuple(sorted(found))


def interleaved_errors(sequence: Sequence, swept: Sweep, wanted: Several[int], *, with_last: bool) -> Tensor:
    """[T, S] relative errors of the slots where axes [Ht, S] were written and [S, Ht] is read.

    Args:
        with_last: the last state was written with the slots.
    """
    read = sequence.features.float()
    if with_last and sequence.last is not None:
        read = torch.cat([read, sequence.last.float()[:, None]], 1)
    again = read.reshape(len(read), read.shape[2], read.shape[1]).transpose(1, 2)[:, : len(wanted)]
    own = torch.stack([swept.stream[b][: len(read)].float() for b in wanted], 1)
    return relative(again, own)
