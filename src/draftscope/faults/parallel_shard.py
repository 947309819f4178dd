"""parallel-shard: a shard of a tensor, a sequence or a set of ranks is taken for the whole."""

from __future__ import annotations

from dataclasses import replace

from draftscope.boundaries import Boundary
from draftscope.eagle3.config import DraftConfig
from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.facts_rows import Blocks, RowFacts, Share, SlotRows
from draftscope.faults.measurements import Measurements, SideFacts, SideName
from draftscope.faults.plant import Plant
from draftscope.faults.req_mix import fresh
from draftscope.faults.rowcause import figures, of_cause, told
from draftscope.findings import Evidence, Fix
from draftscope.target.model import Target
from draftscope.target.rows import Channels, On, SequenceShards
from draftscope.target.spoiling import Spoiler
from draftscope.target.wiring import Wiring

_SPOILERS: dict[str, Spoiler] = {
    "first half of the channels": Channels(2),
    "first quarter of the channels": Channels(4),
    "first half of the channels, one slot": On(Channels(2), slots=(1,)),
    "first half of the channels twice": Channels(2, "again"),
    "shards in another order": Channels(2, "turned"),
    "four shards in another order": Channels(4, "turned"),
    "first half of the rows": On(SequenceShards(2), phase="prefill"),
    "row shards in another order": On(SequenceShards(2, "turned"), phase="prefill"),
}
_SUMS = {
    "partial sums": (2, (), "serve"), "partial sums of eight ranks, one slot": (8, (1,), "serve"),
    "train partial sums": (2, (), "train"),
}
"""By variant: ranks, slots (() = all), side."""


class ParallelShard(Fault):
    """Channels of one tensor-parallel rank, rows of one sequence-parallel rank, ranks that capture unlike layers."""

    id = "parallel-shard"
    title = "a shard taken for the whole"
    verdict = "wiring"
    variants = (*_SPOILERS, *_SUMS, "train first half of the channels", "train shards in another order",
                "train first half of the rows", "train half of the rows written", "train every second sample of other layers")
    page = Page(
        symptom="right on one device, wrong on several; gets worse with their number",
        traces={
            **{name: Trace(
                says=f"the engine hands the draft {name}", input="--serve" + (", --target" if "order" in name else ""),
                shows="equal blocks of channels are zeros, copies, or in another order; or rows behind the first n-th of every "
                      "prompt are zeros or in another order", rung="served",
            ) for name in _SPOILERS},
            **{f"train {name}": Trace(
                says="the data writer stores them", input="--train" + (", --target" if "order" in name else ""),
                shows="the same in the training files", rung="trained",
            ) for name in ("first half of the channels", "shards in another order", "first half of the rows")},
            **{name: Trace(
                says=f"{'the data writer' if side == 'train' else 'the engine'} takes a layer's output before it is summed over "
                     f"{ranks} ranks (a sum that is fused with the next layer's norm)",
                input=f"--{side}, --target",
                shows="slots are their boundary without its MLP, but for one rank's part of that, fitted by least squares",
                rung="trained" if side == "train" else "served",
            ) for name, (ranks, _, side) in _SUMS.items()},
            "train half of the rows written": Trace(
                says="one rank writes its share of every sequence", input="--train",
                shows="every file holds an n-th as many rows as tokens", rung="none"),
            "train every second sample of other layers": Trace(
                says="data-parallel ranks capture unlike layers", input="--train, --target",
                shows="whole samples hold other boundaries while others are right", rung="trained"),
        },
        lookalikes={
            "req-mix": "it moves whole rows, and row counts are no whole fraction of the tokens",
            "rotated-space": "its channels mix, whereas here equal blocks of them are right",
            "graph-capture": "its zeros follow phase or bucket, not the n-ths of each prompt",
            "layer-set": "it is the same in every sequence",
            "scale-mult": "one factor fits every channel there",
        },
        unseen={
            "partial sums of experts": "only an MLP with one last projection is cut into its ranks' parts",
            "pipeline stages with default ids": "some slots hold other layers in every sequence: that is layer-set",
        },
        reports=("NeMo RL PR #3699", "verl-SpeCo PR #71", "vllm-ascend issue #5825"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = [self._rows(side, rows) for side, _, rows in of_cause(m, "parallel-shard")]
        for side in m.sides():
            facts = m.rows.get(side.name)
            if facts is not None and facts.blocks:
                found.append(self._channels(side, facts.blocks))
            if facts is not None and facts.shares:
                found.append(self._sums(side, facts.shares))
        return found + [s for name, facts in m.rows.items() if (s := _fraction(name, facts))]

    def _rows(self, side: SideFacts, rows: list[SlotRows]) -> Suspicion:
        serve = side.name == "serve"
        ranks = next((r.shard for r in rows if r.shard), None)
        turned = any(r.offsets for r in rows)
        says = f"other layers in {max(r.whole for r in rows)} whole sequences, and the right ones in the rest"
        if ranks:
            says = (f"every prompt's rows in another order of its {ranks} equal parts" if turned else
                    f"the first {_nth(ranks)} of every prompt's rows, and zeros for the others")
        return Suspicion(
            fault=self.id, side=side.name, where=[side.where(r.slot) for r in rows],
            says=f"{of_side(side.name)} hold {says}",
            # Sequences of another run, mixed in with these, would look as those of another rank do.
            strength="proven" if ranks else "supported",
            evidence=[Evidence(
                hypothesis="one rank's share was taken for the whole, or ranks capture unlike layers",
                prediction="rows are right up to an n-th of each prompt; or sequences are right or wrong as a whole",
                measurement="each row against every place of its own token, and against all other rows",
                result=told(side, rows), decides="parallel-shard if the n-ths of every prompt, or whole sequences, are wrong",
                figures=figures(side, rows) | {"ranks": ranks},
            )],
            fix=Fix(says="Gather rows over the sequence-parallel ranks, in their order, before they are handed over, and give "
                         "every rank the same layers." + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(reference=frozenset(r.slot for r in rows)) if serve else None,
        )

    def _channels(self, side: SideFacts, blocks: list[Blocks]) -> Suspicion:
        serve = side.name == "serve"
        first = blocks[0]
        return Suspicion(
            fault=self.id, side=side.name, where=[side.where(held.slot) for held in blocks],
            says=f"{of_side(side.name)} hold {_held(first)} of {first.ranks} equal blocks of channels in {len(blocks)} slots",
            strength="proven",
            evidence=[Evidence(
                hypothesis="one rank's channels were taken for all of them",
                prediction="channels fall into n equal blocks that are zeros, copies, or another block's of the right state",
                measurement="blocks of channels against zero and against each other, bit for bit, and against the target's state "
                            "where it is at hand",
                result="; ".join(f"{side.where(held.slot)}: {_held(held)} of {held.ranks}"
                                 + (f" (error {held.error:.2g})" if held.error is not None else "") + f", in {held.rows} rows"
                                 for held in blocks),
                decides="parallel-shard if whole blocks are exchanged or missing; a rotation mixes all channels",
                figures={side.where(held.slot): {"ranks": held.ranks, "holds": list(held.holds)} for held in blocks},
            )],
            fix=Fix(says="Gather the channels over the tensor-parallel ranks, in their order, before they are handed over."
                         + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve and side.proof == "sweep" else "bounded" if serve else "needs-retraining",
            undo=Undo(reference=frozenset(held.slot for held in blocks)) if serve and side.proof == "sweep" else None,
        )

    def _sums(self, side: SideFacts, shares: list[Share]) -> Suspicion:
        serve = side.name == "serve"
        first = shares[0]
        return Suspicion(
            fault=self.id, side=side.name, where=[side.where(one.slot) for one in shares],
            says=f"{of_side(side.name)} in {', '.join(side.where(one.slot) for one in shares)} were taken before the ranks' "
                 f"outputs were summed: they hold one of {first.ranks} parts of their layer's MLP",
            strength="proven",
            evidence=[Evidence(
                hypothesis="a layer's output was taken before its sum over the tensor-parallel ranks",
                prediction="the slot is the stream between attention and MLP plus an n-th of the MLP's inner channels, through "
                           "the last projection",
                measurement="the MLP's output cut into eight parts by inner channels, and the factor of each in the slot fitted "
                            "by least squares on every other row; relative error on the rest",
                result="; ".join(f"{side.where(one.slot)} (boundary {one.wanted}): rank {one.rank} of {one.ranks} alone, error "
                                 f"{one.error:.2g}, where the whole stream leaves {one.plain:.2g}" for one in shares),
                decides="parallel-shard if one rank's part is there and the others are not; residual-missing if none is",
                figures={side.where(one.slot): {"boundary": one.wanted, "ranks": one.ranks, "rank": one.rank, "rows": one.rows,
                                                "plain": one.plain, "error": one.error} for one in shares},
            )],
            fix=Fix(says="Take the states behind the all-reduce of the layer that makes them: switch off its fusion with the "
                         "next norm where states are captured, or sum the captured ones over the ranks."
                         + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(reference=frozenset(one.slot for one in shares)) if serve else None,
        )

    def why_not(self, m: Measurements) -> str:
        looked = [f"{side.name}: no equal block of channels is zeros or a copy of another, and no n-th of the rows is missing"
                  for side in m.sides() if (facts := m.rows.get(side.name)) is not None and not facts.blocks]
        return "; ".join(looked) or "no states were given (--train, --serve)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"parallel-shard has no variant {variant!r}")
        if variant == "train half of the rows written":
            return replace(plant, rewritten=replace(plant.rewritten, train="half of the rows"))
        if variant == "train every second sample of other layers":
            return replace(plant, train_ranks=(plant.train, replace(plant.train, slots=(Boundary(1), Boundary(3), Boundary(6)))))
        if variant in _SUMS:
            ranks, which, side = _SUMS[variant]
            wiring = getattr(plant, side)
            slots = tuple(replace(slot, kind="partial", ranks=ranks) if not which or i in which else slot
                          for i, slot in enumerate(wiring.slots))
            return replace(plant, **{side: replace(wiring, slots=slots)})
        name = variant.removeprefix("train ")
        made = fresh(SequenceShards(2) if name == "first half of the rows" and name != variant else _SPOILERS[name])
        side = "train" if name != variant else "serve"
        wiring = replace(getattr(plant, side), spoilers=(made,))
        return replace(plant, **{side: wiring})

    def beyond(self, variant: str, target: Target, draft: DraftConfig) -> str:
        ranks = _SUMS[variant][0] if variant in _SUMS else 0
        return "" if not ranks or target.adds_shares(ranks) else "its MLPs' outputs are not just the sum of the ranks' parts"

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots, spoilers=()))


def _nth(ranks: int | None) -> str:
    return {2: "half", 4: "quarter", 8: "eighth"}.get(ranks or 0, f"{ranks}th")


def _held(held: Blocks) -> str:
    return "[" + ", ".join("zeros" if block is None else str(block) for block in held.holds) + "]"


def _fraction(name: SideName, facts: RowFacts) -> Suspicion | None:
    """Files with an n-th of their tokens' rows, all of them."""
    counted = facts.counted
    ranks = None if counted is None else counted.fraction()
    if ranks is None or counted is None:
        return None
    file, rows, tokens = counted.files[0]
    train = name == "train"
    return Suspicion(
        fault="parallel-shard", side=name,
        where=["train:tensor hidden_states" if train else "tensor fc_input"],
        says=f"every file holds rows of states for one {_nth(ranks)} of its tokens", strength="proven",
        evidence=[Evidence(
            hypothesis="one sequence-parallel rank's rows were taken for all of them",
            prediction="rows times ranks are the tokens, in every file",
            measurement="rows and tokens of every file, from its header",
            result=f"{file}: {rows} rows, {tokens} tokens; the same fraction in all {counted.of} files",
            decides="parallel-shard if all files share the fraction; rows missing otherwise are req-mix",
            figures={"ranks": ranks, "rows": rows, "tokens": tokens},
        )],
        fix=Fix(says="Gather the rows over the ranks before they are written." + (" Then retrain." if train else "")),
        recovery="needs-retraining" if train else "needs-serving",
    )
