"""Faults at strengths and places that are none of their variants: what the rules were not tuned on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftscope.boundaries import Boundary, Kind
from draftscope.eagle3.sampling import Sampling
from draftscope.faults.plant import Build, Dump, Plant
from draftscope.faults.runtimes import reads_otherwise, runs_otherwise
from draftscope.faults.writing import Author, Rendering
from draftscope.target.rows import (
    Behind,
    Channels,
    Filled,
    Interleaved,
    Later,
    OfLastPass,
    OfNeighbour,
    On,
    Overflowing,
    Padding,
    SequenceShards,
    WithoutPrefix,
)
from draftscope.target.spoiling import Normed, Phase, Scaled, Shifted, Spoiler, Turned
from draftscope.target.wiring import Wiring

Drawn = tuple[str, Plant]
Maker = Callable[[Plant, random.Random, int], Drawn]
_MLP, _ATTENTION = "midlayer.mlp.", "midlayer.self_attn."
_LOST = (f"{_ATTENTION}k_proj.", f"{_ATTENTION}v_proj.", f"{_ATTENTION}o_proj.", f"{_ATTENTION}", f"{_MLP}", f"{_MLP}gate_proj.",
         f"{_MLP}down_proj.", "midlayer.input_layernorm.")
_IN_PLACE = ("ones norm.weight", "ones midlayer.hidden_norm.weight", "ones midlayer.input_layernorm.weight",
             "swap midlayer.hidden_norm.weight midlayer.input_layernorm.weight",
             "swap midlayer.hidden_norm.weight midlayer.post_attention_layernorm.weight")


def _sides(plant: Plant, draw: random.Random, made: Callable[[Wiring], Wiring]) -> Drawn:
    """The change on one side, drawn: two times of three where it serves."""
    if draw.random() < 2 / 3:
        return "", replace(plant, serve=made(plant.serve))
    return "train ", replace(plant, train=made(plant.train))


def _scale(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    slots = len(plant.serve.slots)
    which = tuple(sorted(draw.sample(range(slots), draw.choice([1, 1, 2, slots]))))
    factor = float(f"{math.exp(draw.choice([-1, 1]) * draw.uniform(math.log(1.08), math.log(30))):.3g}")
    if draw.random() < 1 / 3:
        scaled = Scaled(factor, which, phase="verify")
        return f"slots {list(which)} x{factor:g} when verifying", replace(plant, serve=_spoilt(plant.serve, scaled))
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Scaled(factor, which)))
    return f"{side}slots {list(which)} x{factor:g}", made


def _spoilt(wiring: Wiring, spoiler: Spoiler) -> Wiring:
    return replace(wiring, spoilers=(*wiring.spoilers, spoiler))


def _turned(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    which = tuple(sorted(draw.sample(range(len(plant.serve.slots)), draw.choice([1, 2, 3]))))
    seed = draw.randrange(1000, 9999)
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Turned(slots=which, seed=seed)))
    return f"{side}slots {list(which)} in basis {seed}", made


def _moved(plant: Plant, draw: random.Random, wanted: list[int]) -> Drawn:
    slots = tuple(Boundary(b) for b in wanted)
    side, made = _sides(plant, draw, lambda w: replace(w, slots=slots))
    return f"{side}boundaries {wanted}", made


def _offset(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = [slot.index for slot in plant.serve.slots]
    step = draw.choice([-1, 1])
    # Fewer slots than all: that all are moved is a variant.
    which = draw.sample(range(len(own)), draw.randrange(1, len(own)))
    return _moved(plant, draw, [min(max(b + step, 0), layers) if i in which else b for i, b in enumerate(own)])


def _set(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = [slot.index for slot in plant.serve.slots]
    while True:
        wanted = [draw.randrange(layers + 1) if draw.random() < 0.7 else b for b in own]
        steps = {w - b for w, b in zip(wanted, own, strict=True) if w != b}
        if steps and steps not in ({1}, {-1}):
            return _moved(plant, draw, wanted)


def _partial(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = plant.serve.slots
    which = draw.sample(range(len(own)), draw.randrange(1, len(own) + 1))
    kind: Kind = draw.choice(["branch", "partial"])
    slots = tuple(Boundary(slot.index, "pre", kind) if i in which else slot for i, slot in enumerate(own))
    side, made = _sides(plant, draw, lambda w: replace(w, slots=slots))
    return f"{side}{kind} in slots {sorted(which)}", made


def _shift(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    by = draw.choice([-2, -1, 1, 2])
    which = tuple(sorted(draw.sample(range(len(plant.serve.slots)), draw.choice([1, 2])))) if draw.random() < 2 / 3 else ()
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Shifted(by, which)))
    return f"{side}{f'slots {list(which)} ' if which else ''}{by:+d}", made


def _final_norm(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    times = draw.choice([1, 1, 2, 3])
    if draw.random() < 1 / 4:
        return f"train last state {times} times", replace(plant, last=(*plant.last, Normed(times=times)))
    which = _some_slots(plant, draw)
    phase: Phase | None = draw.choice([None, None, "prefill", "verify"])
    if phase is not None:
        made = replace(plant, serve=_spoilt(plant.serve, Normed(which, times, phase)))
        return f"slots {list(which)} {times} times, {phase} rows", made
    side, made = _sides(plant, draw, lambda w: _spoilt(w, Normed(which, times)))
    return f"{side}slots {list(which)} {times} times", made


def _some_slots(plant: Plant, draw: random.Random) -> tuple[int, ...]:
    count = len(plant.serve.slots)
    return tuple(sorted(draw.sample(range(count), draw.randrange(1, count + 1))))


def _neighbour(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    rows = draw.choice([3, 5, 15, 20])
    every, until, slots = draw.choice([2, 3, 5, 6]), draw.choice([8, 12, 16, 32]), _some_slots(plant, draw)
    serving = {
        f"every {every} rows": On(OfNeighbour(), every=every),
        f"verify rows of slots {list(slots)}, every {every}": On(OfNeighbour(), phase="verify", slots=slots, every=every),
        f"prefix of {until} of another call": On(OfNeighbour(), phase="prefill", until=until),
        f"prefix of {rows} dropped": On(WithoutPrefix(rows), phase="prefill"),
        f"tail of {rows} in front": On(Behind(rows), phase="prefill"),
    }
    training: dict[str, Spoiler] = {
        f"tail of {rows} of the sample before in front": Behind(rows),
        f"of the sample before, every {every} rows of slots {list(slots)}": On(OfNeighbour(), slots=slots, every=every),
    }
    return _either(plant, draw, serving, training)


def _either(plant: Plant, draw: random.Random, serving: Mapping[str, Spoiler], training: Mapping[str, Spoiler]) -> Drawn:
    """One of those of the serving or of the training side, drawn evenly from both."""
    said, trained = draw.choice([*((name, False) for name in serving), *((name, True) for name in training)])
    if trained:
        return f"train {said}", replace(plant, train=_spoilt(plant.train, training[said]))
    return said, replace(plant, serve=_spoilt(plant.serve, serving[said]))


def _unwritten(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    slots, bucket, length = _some_slots(plant, draw), draw.choice([16, 24, 40]), draw.choice([32, 48, 80])
    graphs = draw.choice([(1, 1), (1, 2), (1, 4), (4, 64), (6, 64)])
    serving = {
        f"zeros in verify rows of slots {list(slots)}": On(Filled(), phase="verify", slots=slots),
        f"zeros in prefill rows of slots {list(slots)}": On(Filled(), phase="prefill", slots=slots),
        f"graphs for {graphs[0]} to {graphs[1]} requests": On(OfLastPass(graphs), phase="verify"),
        f"padding behind {bucket}": On(Padding(), phase="prefill", since=bucket),
    }
    return _either(plant, draw, serving, {f"zeros behind {length}": On(Filled(), since=length),
                                          f"padding behind {length}": On(Padding(), since=length)})


def _alias(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    race, last = draw.choice([2, 4, 5, 6, 8]), draw.random() < 0.5
    said = f"{'the last' if last else 'a later'} state in one of {race} rows"
    phase: Phase = draw.choice(["prefill", "verify"])
    return _either(plant, draw, {said: Later(last, race), f"{said}, {phase} rows": On(Later(last, race), phase=phase)},
                   {said: Later(last, race)})


def _shards(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    ranks, slots, parts = draw.choice([2, 4, 8, 16]), _some_slots(plant, draw), draw.choice([3, 4])
    other = tuple(Boundary(b) for b in sorted(draw.sample(range(layers + 1), len(plant.train.slots))))
    if draw.random() < 1 / 6 and other != plant.train.slots:
        odd = replace(plant.train, slots=other)
        count = draw.choice([2, 3, 4])
        return (f"train one of {count} samples of boundaries {[b.index for b in other]}",
                replace(plant, train_ranks=(*[plant.train] * (count - 1), odd)))
    channels: dict[str, Spoiler] = {
        f"first of {ranks} shards": Channels(ranks),
        f"first of {ranks} shards, slots {list(slots)}": On(Channels(ranks), slots=slots),
        f"first of {ranks} shards in every place": Channels(ranks, "again"),
        f"{ranks} shards in another order, slots {list(slots)}": On(Channels(ranks, "turned"), slots=slots),
    }
    rows: dict[str, Spoiler] = {
        f"first of {parts} parts of the rows": On(SequenceShards(parts), phase="prefill"),
        f"{parts} parts of the rows in another order": On(SequenceShards(parts, "turned"), phase="prefill"),
    }
    return _either(plant, draw, channels | rows, channels | rows)


def _poison(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    rows, every, since = draw.choice([1, 2, 5, 11]), draw.choice([2, 5, 8, 20]), draw.choice([24, 40, 80])
    value, largest = draw.choice([math.nan, math.inf, -math.inf]), draw.choice([1.0, 1.5, 3.0])
    slots, channels = _some_slots(plant, draw), tuple(sorted(draw.sample(range(32), draw.choice([1, 2, 8]))))
    weight = draw.choice([f"{_MLP}down_proj.weight", f"{_ATTENTION}q_proj.weight", "midlayer.hidden_norm.weight"])
    kind = draw.randrange(6)
    if kind == 0:
        return f"checkpoint: {weight}", replace(plant, poison=weight)
    if kind == 1:
        side, made = _sides(plant, draw, lambda w: replace(w, poison=rows))
        return f"{side}{rows} rows", made
    spoilers: list[tuple[str, Spoiler]] = [
        (f"{value} in channels {list(channels)}", On(Filled(value), channels=channels)),
        (f"{value} in slots {list(slots)}, every {every} rows", On(Filled(value), slots=slots, every=every)),
        (f"{value} behind row {since}", On(Filled(value), since=since)),
        (f"infinite beyond {largest:g}", Overflowing(largest)),
    ]
    said, spoiler = spoilers[kind - 2]
    side, made = _sides(plant, draw, lambda w: _spoilt(w, spoiler))
    return f"{side}{said}", made


def _width(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    own = plant.train.slots
    slots = {"the first slot missing": own[1:], "the first slot alone": own[:1], "a slot too many": (*own, Boundary(layers)),
             "every slot twice": (*own, *own)}
    name = draw.choice([*slots, "mixed"])
    if name != "mixed":
        return f"train {name}", replace(plant, train=replace(plant.train, slots=slots[name]))
    phase: Phase = draw.choice(["prefill", "verify"])
    return _either(plant, draw, {f"channels before slots, {phase} rows": On(Interleaved(), phase=phase)},
                   {"channels before slots, the last state apart": Interleaved()})


def _runs(*kinds: Mapping[str, Sequence[Any]]) -> Maker:
    """An engine that runs the draft otherwise: of one kind, drawn, each habit at one of its values."""
    def made(plant: Plant, draw: random.Random, layers: int) -> Drawn:
        habits = {name: draw.choice(values) for name, values in draw.choice(kinds).items()}
        return ", ".join(f"{name} = {value}" for name, value in habits.items()), runs_otherwise(plant, **habits)
    return made


def _window(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    if draw.random() < 0.5:
        size = draw.choice([12, 16, 24, 40, 48])
        return f"window of {size}", reads_otherwise(plant, sliding_window=size)
    own = draw.choice([40, 48, 56])
    other = draw.choice([None, own // 2, own - 1, own + 1, own // 2 * 3 // 2])
    configured = replace(plant, config=(*plant.config, ("sliding_window", own), ("layer_types", ["sliding_attention"])))
    return f"window of {other} in place of {own}", reads_otherwise(configured, sliding_window=other)


def _limit(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    limit = draw.choice([24, 40, 48, 56, 72])
    configured = replace(plant, config=(*plant.config, ("max_position_embeddings", limit)))
    return f"{limit} positions", runs_otherwise(configured, table=limit)


def _rotary(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    bases = [theta for theta in (2e4, 1e5, 3e5, 5e6, 1e7) if theta != plant.theta]
    kinds: list[dict[str, Any]] = [
        {"rope_theta": draw.choice(bases)}, {"rope_type": "linear", "factor": draw.choice([2.0, 3.0, 8.0])},
        {"partial_rotary_factor": draw.choice([0.25, 0.75])},
    ]
    changed = draw.choice(kinds)
    read = {"rope_type": "default", "rope_theta": plant.theta, **changed}
    return ", ".join(f"{name} = {value}" for name, value in changed.items()), reads_otherwise(plant, rope_parameters=read)


def _sampling(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    warm = draw.choice([0.6, 0.8, 1.0, 1.3])
    times = draw.choice([0.25, 0.5, 1.6, 3.0])
    said, sampling = draw.choice([
        ("equality", Sampling(warm, draft="probabilistic", equality=True)), ("greedy drafts", Sampling(warm)),
        (f"drafts at {warm * times:g}", Sampling(warm, draft="probabilistic", draft_temperature=warm * times)),
    ])
    return f"{said}, the target at {warm:g}", replace(plant, sampling=sampling)


def _weights(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    lost, in_place = draw.choice(_LOST), draw.choice(_IN_PLACE)
    whole = draw.random() < 0.5
    if draw.random() < 0.5:
        engine = plant.engine
        engine = replace(engine, lost=(*engine.lost, lost)) if whole else replace(engine, altered=(*engine.altered, in_place))
        return f"engine: {lost if whole else in_place}", replace(plant, engine=engine)
    if whole:
        return f"checkpoint: {lost}", replace(plant, drop=(*plant.drop, lost))
    return f"checkpoint: {in_place}", replace(plant, export=(*plant.export, in_place))


def _map(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    by = draw.choice([-2, -1, 2, 3, 5])
    place = draw.choice(["engine", "checkpoint", "checkpoint without t2d"])
    if place == "engine":
        return f"engine: {by:+d}", replace(plant, engine=replace(plant.engine, altered=(f"map {by}",)))
    return f"{place}: {by:+d}", replace(plant, export=(f"map {by}", *(["map without t2d"] if "without" in place else [])))


def _head(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    # A tie that nobody asked for is weight-missing's variant: of a tied target its head and its embedding are one.
    tied = replace(plant, config=(*plant.config, ("tie_word_embeddings", True)))
    if draw.random() < 0.5:
        return "engine ties it to the target's head", replace(tied, engine=replace(plant.engine, altered=("head target first",)))
    return "checkpoint: the embedding's first rows as head", replace(tied, export=("head embedding",))


def _rounded(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    kind = draw.choice(["fp8", "int8", "int4", "codes"])
    parts = sorted(draw.sample(["fc.", "lm_head.", _MLP, _ATTENTION], 1 if kind == "codes" else draw.choice([1, 2, 3])))
    done = tuple(f"{kind} {part}" for part in parts)
    if draw.random() < 0.5:
        return f"engine: {', '.join(done)}", replace(plant, engine=replace(plant.engine, altered=done))
    return f"checkpoint: {', '.join(done)}", replace(plant, export=done, source=True)


def _flag(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    if draw.random() < 0.5:
        size = draw.choice([4, 12, 24, 48])
        return f"checkpoint: head_dim {size}", replace(plant, config=(*plant.config, ("head_dim", size)), refused=True)
    builds: dict[str, Build] = {"bias": "fc_bias", "norm_before_fc": "norm_before_fc"}
    name = draw.choice(list(builds))
    made = replace(plant, draft=builds[name], config=(*plant.config, (name, None)), source=True)
    return f"checkpoint: converted without {name}", made


def _unsupervised(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    part = draw.choice([2, 4, 5, 8])
    return f"one of {part}", replace(plant, loss_mask="empty in part", part=part)


def _span(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    by = draw.choice([2, 3, 4, 6])
    return draw.choice([(f"{by} tokens early", replace(plant, loss_mask="early", by=by)),
                        (f"{by} tokens late", replace(plant, loss_mask="late", by=by))])


def _rendered(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    kinds: list[Rendering] = ["", "system turn", "other system turn", "other template", "doubled first token",
                              "no generation prompt", "thinking block", "bare"]
    train, serve = draw.sample(kinds, 2)
    made = replace(plant, texts=replace(plant.texts, train=train, serve=serve))
    return f"{train or 'as it is'} trained, {serve or 'as it is'} served", made


def _authored(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    author: Author = draw.choice(["other model", "stale target"])
    off = draw.choice([0.35, 0.45, 0.6, 0.8])
    return f"train {author}, off by {off:g}", replace(plant, texts=replace(plant.texts, author=author, off=off))


def _heldout(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    part = draw.choice([2, 4, 5, 6])
    return f"train one of {part} held out", replace(plant, heldout="of training", part=part)


def _dumped(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    dump: Dump = draw.choice(["written twice", "part missing"])
    part = draw.choice([2, 4, 5, 6])
    return f"{dump}: one of {part}", replace(plant, dump=dump, part=part)


def _budget(plant: Plant, draw: random.Random, layers: int) -> Drawn:
    sequences = draw.choice([1, 2, 3, 5])
    return f"{sequences} sequences", replace(plant, training_sequences=sequences)


OTHERS: dict[str, Maker] = {
    "layer-offset": _offset, "layer-set": _set, "residual-missing": _partial, "final-norm": _final_norm, "scale-mult": _scale,
    "token-shift": _shift, "rotated-space": _turned,
    "req-mix": _neighbour, "graph-capture": _unwritten, "capture-alias": _alias, "parallel-shard": _shards, "nonfinite": _poison,
    "schema-width": _width,
    "pos-id": _runs({"ahead": (-3, -2, 2, 3)}, {"after_prompt": (-3, -2, 2, 5)}, {"padded_to": (16, 32, 128)}),
    "draft-kv": _runs({"warm": (2, 4, 8, 24)}, {"prefix": (1, 2, 4)}, {"unrefreshed": (1, 2, 4, 5)}, {"chunk": (8, 12, 24)},
                      {"unrewound": ("rejected",), "counted": (True,)}),
    "recur-state": _runs({"fed": ("previous", "branch"), "fed_first": (True,)}),
    "attn-mask": _window, "ctx-limit": _limit, "rope": _rotary, "sampler": _sampling,
    "weight-missing": _weights, "vocab-map": _map, "tied-head": _head, "quant-inherit": _rounded, "config-flag": _flag,
    "lossmask-empty": _unsupervised, "lossmask-span": _span, "template": _rendered, "data-offpolicy": _authored,
    "leak": _heldout, "run-ops": _dumped, "train-budget": _budget,
}
"""By fault id: what was done in words, and the set-up, drawn for a target of so many layers. A target's precision, a reported
figure and the state that a trainer shows have no strength but those of their variants."""
