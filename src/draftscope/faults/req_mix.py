"""req-mix: rows belong to another request or call, or some are missing."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.facts_rows import OTHER_SEQUENCE, SAME_SEQUENCE, RowFacts, SlotRows
from draftscope.faults.measurements import Measurements, SideFacts, SideName
from draftscope.faults.plant import Plant
from draftscope.faults.rowcause import displaced, figures, of_cause, phases, told
from draftscope.findings import Evidence, Fix
from draftscope.target.rows import Behind, OfNeighbour, On, WithoutPrefix
from draftscope.target.spoiling import Spoiler

_SPOILERS: dict[str, Spoiler] = {
    "of the next request": On(OfNeighbour()),
    "of the next request, every fourth row": On(OfNeighbour(), every=4),
    "of the next request, verify rows": On(OfNeighbour(), phase="verify"),
    "of the next request, one slot": On(OfNeighbour(), slots=(1,)),
    "prefix of another call": On(OfNeighbour(), phase="prefill", until=24),
    "prefix rows dropped": On(WithoutPrefix(12), phase="prefill"),
    "tail of the last call in front": On(Behind(9), phase="prefill"),
}


class ReqMix(Fault):
    """Rows taken by the wrong bounds or order of requests, a cached prefix's or the last call's rows in place of one's own."""

    id = "req-mix"
    title = "rows of another request"
    verdict = "wiring"
    variants = (
        *_SPOILERS, "train of the sample before", "train tail of the sample before in front", "train fewer rows than tokens",
        "fewer rows than tokens",
    )
    page = Page(
        symptom="acceptance falls with the batch size or with cache hits; a request served alone is accepted as it should be",
        traces={
            **{name: Trace(
                says=f"the engine hands the draft rows {name}",
                input="--serve, --target",
                shows="rows of a slot are, within rounding, the target's state of a row of another request (or far away in "
                      "the same one), while rows served alone are right",
                rung="served",
            ) for name in _SPOILERS},
            **{f"train {name}": Trace(
                says=f"the data writer stores rows {name}", input="--train, --target",
                shows="rows of a sample hold the target's states of another sample's tokens", rung="trained",
            ) for name in ("of the sample before", "tail of the sample before in front")},
            **{name: Trace(
                says="fewer state rows than tokens were written", input="--train" if "train" in name else "--serve",
                shows="the files hold fewer rows of states than token ids, by no common factor", rung="none",
            ) for name in ("train fewer rows than tokens", "fewer rows than tokens")},
        },
        lookalikes={
            "token-shift": "its rows lie one or two rows away in the same sequence, all at one distance",
            "graph-capture": "its rows are zeros, padding, or what the request's own step before held there",
            "rotated-space": "the cosines between rows stay what they were; here they are those of other rows",
            "parallel-shard": "row counts are a whole fraction of the tokens, or channels are mixed and not rows",
            "capture-alias": "its rows hold another place of their own token",
        },
        unseen={
            "rows of requests that the capture does not hold": "such rows are found nowhere; capture the whole batch",
            "without the target": "only requests that begin with the same tokens contradict each other; that is `supported`",
        },
        reports=("sglang issue #26163", "verl-SpeCo PR #71"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = [self._rows(m, side, facts, rows) for side, facts, rows in of_cause(m, "req-mix")]
        found += [s for name, counts in m.rows.items() if (s := _counted(name, counts))]
        for side in m.sides():
            facts = m.rows.get(side.name)
            if facts is not None and not any(s.side == side.name for s in found):
                found += _by_itself(side, facts)
        return found

    def _rows(self, m: Measurements, side: SideFacts, facts: RowFacts, rows: list[SlotRows]) -> Suspicion:
        serve = side.name == "serve"
        moved = next((d for d in map(displaced, rows) if d is not None), None)
        other = max(r.kinds.get(OTHER_SEQUENCE, 0) for r in rows)
        own = max(r.kinds.get(SAME_SEQUENCE, 0) for r in rows)
        one = "request" if serve else "sample"
        what = f"{other} rows of another {one}" if other else ""
        if own and moved is not None:
            what += f"{' and ' if what else ''}{own} rows from {abs(moved)} rows {'on' if moved > 0 else 'back'} in their own"
        share = max(1 - r.share("right") for r in rows)
        wrong = phases(rows, OTHER_SEQUENCE, SAME_SEQUENCE)
        return Suspicion(
            fault=self.id, side=side.name, where=[side.where(r.slot) for r in rows],
            says=f"{of_side(side.name)} hold {what}, in {len(rows)} slots ({share:.0%} of the rows of a slot are wrong"
                 + (f"{wrong})" if serve else ")"),
            strength="proven",
            evidence=[Evidence(
                hypothesis=f"rows belong to another {one} or call",
                prediction="every row is the target's state of its own token if rows are where they belong",
                measurement="each row against every place of its own token, then against the rows of all sequences at the "
                            "boundary that its slot should hold",
                result=told(side, rows),
                decides="req-mix if rows are found elsewhere, and not all one or two rows away (token-shift)",
                figures=figures(side, rows),
            )],
            fix=Fix(says=_FIX + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(reference=frozenset(r.slot for r in rows)) if serve else None,
        )

    def why_not(self, m: Measurements) -> str:
        looked = [f"{side.name} {facts.prefix_rows} rows of texts that begin alike, {facts.prefix_differ} unlike"
                  for side in m.sides() if (facts := m.rows.get(side.name)) is not None]
        return "; ".join(looked) or "no states were given (--train, --serve)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant in ("train fewer rows than tokens", "fewer rows than tokens"):
            side = "train" if "train" in variant else "serve"
            return replace(plant, rewritten=replace(plant.rewritten, **{side: "fewer rows"}))
        if variant.startswith("train"):
            made: Spoiler = OfNeighbour() if "tail" not in variant else Behind(9)
            if variant not in self.variants:
                raise ValueError(f"req-mix has no variant {variant!r}")
            return replace(plant, train=replace(plant.train, spoilers=(fresh(made),)))
        if variant not in _SPOILERS:
            raise ValueError(f"req-mix has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, spoilers=(fresh(_SPOILERS[variant]),)))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, spoilers=()), rewritten=replace(plant.rewritten, serve=""))


_FIX = ("Take the bounds of each request's rows before anything reorders, caches or overwrites them, and empty what is kept "
        "between calls; serve one request at a time to confirm.")


def _counted(name: SideName, facts: RowFacts) -> Suspicion | None:
    """Files with fewer rows of states than tokens, by no common factor."""
    counted = facts.counted
    if counted is None or counted.fraction() is not None or not counted.fewer():
        return None
    file, rows, tokens = counted.fewer()[0]
    where = "train:tensor hidden_states" if name == "train" else "tensor fc_input"
    return Suspicion(
        fault="req-mix", side=name, where=[where],
        says=f"{len(counted.fewer())} of {counted.of} files hold fewer rows of states than tokens, such as {rows} for {tokens}",
        strength="proven",
        evidence=[Evidence(
            hypothesis="rows are missing", prediction="a file holds one row of states for every token",
            measurement="rows and tokens of every file, from its header",
            result=f"{file}: {rows} rows, {tokens} tokens; {len(counted.files)} of {counted.of} files do not fit",
            decides="req-mix if rows are missing by no common factor; a fraction that all files share is a shard",
            figures={"files": len(counted.files), "of": counted.of, "rows": rows, "tokens": tokens},
        )],
        fix=Fix(says="Find which rows the producer leaves out (a cached prefix, all but the first of a verify step, the last "
                     "chunk alone) and have it return one row for every token."
                     + (" Write the training data again, then retrain." if name == "train" else "")),
        recovery="needs-retraining" if name == "train" else "needs-serving",
        caveats=["which of the tokens the rows are of cannot be told from their number"],
    )


def _by_itself(side: SideFacts, facts: RowFacts) -> list[Suspicion]:
    """Contradictions inside one source that need no target."""
    found = []
    if facts.broken:
        found.append(_contradiction(
            side, "tensor verified_ids", "what the target chose after a row is not the next accepted row's token", "proven",
            "verified_ids of every accepted row against the token of the next",
            f"{facts.broken} of {facts.chained} differ, first {facts.broken_example}"))
    if facts.prefix_differ and side.proof != "sweep":
        found.append(_contradiction(
            side, "tensor fc_input" if side.name == "serve" else "train:tensor hidden_states",
            "sequences that begin with the same tokens have unlike states there", "supported",
            "rows of the same token prefix in two sequences",
            f"{facts.prefix_differ} of {facts.prefix_rows} rows differ beyond rounding, first {facts.prefix_example}"))
    return found


def _contradiction(side: SideFacts, where: str, says: str, strength: str, measurement: str, result: str) -> Suspicion:
    serve = side.name == "serve"
    return Suspicion(
        fault="req-mix", side=side.name, where=[where], says=f"{of_side(side.name)}: {says}",
        strength="proven" if strength == "proven" else "supported",
        evidence=[Evidence(
            hypothesis="rows belong to another request, step or call", prediction="the same tokens have the same states",
            measurement=measurement, result=result, decides="req-mix if they differ; what the rows hold instead takes the target",
        )],
        fix=Fix(says=_FIX), recovery="needs-serving" if serve else "needs-retraining",
        caveats=["a capture that is not deterministic (capture-alias) shows the same: capture the same prompts twice and give "
                 "both to `draftscope capture verify`"] if strength != "proven" else [],
    )


def fresh(spoiler: Spoiler) -> Spoiler:
    """A spoiler that remembers nothing yet."""
    if isinstance(spoiler, On):
        return replace(spoiler, spoiler=fresh(spoiler.spoiler))
    return type(spoiler)(**{name: value for name, value in vars(spoiler).items() if name not in ("held", "passes")})
