"""graph-capture: rows that a graph's buffer holds from another pass, or that nothing wrote."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.facts_rows import PADDING, SAME_SEQUENCE, ZEROS, RowFacts, SlotRows
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.req_mix import fresh
from draftscope.faults.rowcause import figures, of_cause, phases, told
from draftscope.findings import Evidence, Fix
from draftscope.target.rows import Filled, OfLastPass, On, Padding
from draftscope.target.spoiling import Spoiler

_SPOILERS: dict[str, Spoiler] = {
    "zeros in verify rows": On(Filled(), phase="verify"),
    "zeros everywhere": Filled(),
    "zeros in one slot": On(Filled(), phase="verify", slots=(2,)),
    "rows of the pass before": On(OfLastPass(), phase="verify"),
    "rows of the warm-up above a batch size": On(OfLastPass((1, 3)), phase="verify"),
    "rows of the last full batch below a batch size": On(OfLastPass((8, 64)), phase="verify"),
    "padding behind a bucket": On(Padding(), phase="prefill", since=32),
}
_TRAIN: dict[str, Spoiler] = {
    "train zeros behind a bucket": On(Filled(), since=64),
    "train padding behind a bucket": On(Padding(), since=64),
}


class GraphCapture(Fault):
    """Graphs captured before the auxiliary states were switched on, a static buffer read too early or not written, padding."""

    id = "graph-capture"
    title = "rows of another pass, or never written"
    verdict = "wiring"
    variants = (*_SPOILERS, *_TRAIN, "train rows padded to a bucket")
    page = Page(
        symptom="acceptance near zero, or falling with the batch size, with CUDA graphs on; right when run eagerly",
        traces={
            **{name: Trace(
                says=f"the engine's graph hands the draft {name}", input="--serve, --target",
                shows="rows are zeros, one vector under unlike tokens, or what the step before held there; phase or bucket say "
                      "which graph",
                rung="served",
            ) for name in _SPOILERS},
            **{name: Trace(
                says=f"the engine that extracts training states hands out {name.removeprefix('train ')}", input="--train",
                shows="rows from one position on are zeros, or one vector", rung="trained",
            ) for name in _TRAIN},
            "train rows padded to a bucket": Trace(
                says="whole buckets of rows are written, whatever the length of the text", input="--train",
                shows="every file holds more rows than tokens, a multiple of the bucket", rung="none",
            ),
        },
        lookalikes={
            "req-mix": "its rows are found in other requests, not in the request's own step before",
            "token-shift": "its rows lie at one distance; those of the step before lie as far back as that step accepted",
            "parallel-shard": "its zeros are the last n-ths of every prompt, or channels",
            "layer-set": "a slot that is never written in any phase may have no hook at all",
            "nonfinite": "NaN and Inf are counted first",
        },
        unseen={"default layers in the graphs of one phase": "that is layer-set, whose evidence names the phase",
                "a graph that hands out right states late": "no row shows it"},
        reports=("sglang PR #22836", "sglang PR #22832", "sglang PR #35588"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = [self._rows(side, facts, rows) for side, facts, rows in of_cause(m, "graph-capture")]
        for side in m.sides():
            facts = m.rows.get(side.name)
            if facts is not None and not any(s.side == side.name for s in found):
                found += self._repeats(m, side, facts)
        return found + self._padded(m)

    def _rows(self, side: SideFacts, facts: RowFacts, rows: list[SlotRows]) -> Suspicion:
        serve = side.name == "serve"
        zeros, padding, stale = (max(r.kinds.get(k, 0) for r in rows) for k in (ZEROS, PADDING, SAME_SEQUENCE))
        last = max(r.last_step for r in rows)
        where = phases(rows, ZEROS, PADDING, *([SAME_SEQUENCE] if last else []))
        what = " and ".join(
            text for count, text in (
                (zeros, f"{zeros} rows of zeros"), (padding, f"{padding} rows of one vector, under unlike tokens"),
                (last, f"{last} rows of what the request's step before held there"),
            ) if count
        )
        nothing = all(r.share(ZEROS) > 0.99 for r in rows)
        partly = any(r.kinds.get("right", 0) for r in rows)
        return Suspicion(
            fault=self.id, side=side.name, where=[side.where(r.slot) for r in rows],
            says=f"{of_side(side.name)} hold {what}" + (where if serve else ""),
            strength="supported" if nothing or not partly else "proven",
            evidence=[Evidence(
                hypothesis="rows were never written, or read from a buffer that held another pass",
                prediction="every row is the target's state of its own token; zeros and repetitions do not occur",
                measurement="each row against its own token's state, zeros, all other rows bit for bit, and the row that had its "
                            "place in the step before",
                result=told(side, rows),
                decides="graph-capture if wrong rows are zeros, padding or the step before's; rows of other requests are req-mix",
                figures=figures(side, rows) | {"stale": stale},
            )],
            fix=Fix(says="Switch the auxiliary states on before the graphs are captured, and copy the rows of this batch, no "
                         "more, out of the buffer where the pass that made them ends; run eagerly to confirm."
                         + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(reference=frozenset(r.slot for r in rows)) if serve else None,
            caveats=[_NOTHING] if nothing else [_EAGER],
        )

    def _repeats(self, m: Measurements, side: SideFacts, facts: RowFacts) -> list[Suspicion]:
        """Unlike tokens under one vector, where the target is not there to say more."""
        if not facts.repeats or side.proof == "sweep":
            return []
        rows = sum(one.rows for one in facts.repeats)
        zeros = sum(one.zeros for one in facts.repeats)
        verify = sum(one.verify for one in facts.repeats)
        phase = "only in verify steps" if verify == rows else "only in prefill rows" if not verify else "in both phases"
        serve = side.name == "serve"
        return [Suspicion(
            fault=self.id, side=side.name, where=[side.where(one.slot) for one in facts.repeats],
            says=f"{of_side(side.name)} hold the same vector under unlike tokens, bit for bit, in {rows} rows"
                 + (", all of zeros" if zeros == rows else "") + (f", {phase}" if serve and facts.verify_rows else ""),
            strength="supported",
            evidence=[Evidence(
                hypothesis="rows were never written, or read from a buffer that held another pass",
                prediction="unlike tokens have unlike states", measurement="every row's bytes against all others",
                result="; ".join(f"{side.where(one.slot)}: {one.rows} rows, {one.zeros} of zeros, such as {one.example}"
                                 for one in facts.repeats),
                decides="graph-capture, or rows of another request: the target's weights (--target) tell which",
                figures={side.where(one.slot): {"rows": one.rows, "zeros": one.zeros, "verify": one.verify}
                         for one in facts.repeats},
            )],
            fix=Fix(says="Copy the live rows of each pass, where they are made; run eagerly to confirm."),
            recovery="bounded" if serve else "needs-retraining", caveats=[_EAGER],
        )]

    def _padded(self, m: Measurements) -> list[Suspicion]:
        found = []
        for name, facts in m.rows.items():
            bucket = None if facts.counted is None else facts.counted.padded()
            if bucket is None or facts.counted is None:
                continue
            file, rows, tokens = facts.counted.files[0]
            train = name == "train"
            found.append(Suspicion(
                fault=self.id, side=name,
                where=["train:tensor hidden_states" if train else "tensor fc_input"],
                says=f"every file holds more rows of states than tokens, a multiple of {bucket}: padding was written with them",
                strength="proven",
                evidence=[Evidence(
                    hypothesis="rows behind the live ones were written", prediction="a file holds one row for every token",
                    measurement="rows and tokens of every file, from its header", result=f"{file}: {rows} rows, {tokens} tokens",
                    decides="graph-capture if all counts are multiples of one bucket", figures={"bucket": bucket, "rows": rows,
                                                                                             "tokens": tokens},
                )],
                fix=Fix(says="Copy as many rows as the batch has tokens." + (" Write the training data again." if train else "")),
                recovery="needs-retraining" if train else "needs-serving",
            ))
        return found

    def why_not(self, m: Measurements) -> str:
        looked = [f"{facts.rows} rows of {side.name} were compared bit for bit, and no vector stands under unlike tokens"
                  for side in m.sides() if (facts := m.rows.get(side.name)) is not None and not facts.repeats]
        return "; ".join(looked) or ("what repeats in the rows is laid to another fault, or no states were given (--train, "
                                     "--serve)")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "train rows padded to a bucket":
            return replace(plant, rewritten=replace(plant.rewritten, train="padded rows"))
        if variant in _TRAIN:
            return replace(plant, train=replace(plant.train, spoilers=(fresh(_TRAIN[variant]),)))
        if variant not in _SPOILERS:
            raise ValueError(f"graph-capture has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, spoilers=(fresh(_SPOILERS[variant]),)))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, spoilers=()), rewritten=replace(plant.rewritten, train=""))


_EAGER = ("another path than a graph may leave rows unwritten, too: capture the same prompts eagerly, and give both to "
          "`draftscope capture verify`")
_NOTHING = ("nothing was written in any phase: the layer may have no hook at all (layer-set), or the capture was switched on too "
            "late for every graph; an eager capture tells")
