"""The draft's vocabulary map: how it was stored, what it names, and how much of the text it covers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.errors import DraftscopeError
from draftscope.faults.measurements import MapFacts
from draftscope.findings import Finding
from draftscope.linting.finding import finding
from draftscope.states.tensorfile import TensorFile, read_json
from draftscope.states.torchfile import load_tensors

FREQUENCIES = "token_freq.pt"
_READ = "d2t and t2d read from the checkpoint, their range and their agreement"
_OFFSETS = "`d2t` holds offsets: target id = i + d2t[i], int64, one per draft id"
_SOUND = "i + d2t[i] are distinct ids inside the vocabulary, the true entries of t2d"


def map_facts(checkpoint: Checkpoint) -> MapFacts:
    """How the map was stored: decided by its range and by its agreement with `t2d`."""
    config = checkpoint.config
    size, vocab = config.draft_vocab_size, config.vocab_size
    d2t, t2d = checkpoint.tensors.get("d2t"), checkpoint.tensors.get("t2d")
    rebuilt = rebuilt_ids(checkpoint) is not None

    def facts(stored: str, why: str) -> MapFacts:
        return MapFacts(size, vocab, stored, why, rebuilt)  # type: ignore[arg-type]

    if size == vocab and d2t is None:
        return facts("none needed", "draft and target vocabulary are equal")
    if d2t is None:
        return facts(
            "missing", "the checkpoint holds no d2t" + (", but t2d, from which it can be rebuilt" if rebuilt else " and no t2d")
        )
    offset = torch.arange(size) + d2t.long()
    if size < vocab and not bool(d2t.any()):
        true = "" if t2d is None else f"; {int(t2d.bool().sum())} entries of t2d are true"
        chosen = None if t2d is None else t2d.bool().nonzero().squeeze(-1)
        if chosen is not None and torch.equal(chosen, torch.arange(size)):
            return facts("offset", "d2t is zero and t2d agrees: the draft's vocabulary is the first ids")
        return facts("zero", f"all {size} entries are 0{true}")
    beyond = int(((offset < 0) | (offset >= vocab)).sum())
    if t2d is not None:
        mask = t2d.bool()
        agree_offset = float(mask[offset.clamp(0, vocab - 1)].float().mean()) if not beyond else 0.0
        agree_absolute = float(mask[d2t.long().clamp(0, vocab - 1)].float().mean())
        why = f"{agree_offset:.1%} of i + d2t[i] are true in t2d, {agree_absolute:.1%} of d2t[i]"
        if beyond:
            why = f"{beyond} of {size} ids i + d2t[i] lie beyond the vocabulary of {vocab}; {why}"
        if agree_offset < 0.99:
            return facts("absolute" if agree_absolute > 0.99 else "contradicts", why)
        return facts("offset", why)
    if beyond and bool(((d2t >= 0) & (d2t < vocab)).all()) and len(torch.unique(d2t)) == size:
        return facts(
            "absolute",
            f"{beyond} of {size} ids i + d2t[i] lie beyond the vocabulary of {vocab}; the d2t[i] are distinct ids within it",
        )
    return facts("offset", f"i + d2t[i] lie in {int(offset.min())}..{int(offset.max())} of {vocab}")


def rebuilt_ids(checkpoint: Checkpoint) -> Tensor | None:
    """Target ids [D] from `t2d`, whose i-th true entry is draft id i (stacks sort ascending); None without a fitting t2d."""
    t2d = checkpoint.tensors.get("t2d")
    if t2d is None:
        return None
    ids = t2d.bool().nonzero().squeeze(-1)
    return ids if len(ids) == checkpoint.config.draft_vocab_size else None


def mapped_ids(checkpoint: Checkpoint) -> Tensor:
    """Target id of every draft id [D] int64 as the offsets say, not clamped; without a map the draft ids themselves."""
    own = torch.arange(checkpoint.config.draft_vocab_size)
    d2t = checkpoint.tensors.get("d2t")
    return own if d2t is None else own + d2t.long()


def is_sorted(checkpoint: Checkpoint) -> bool:
    """Whether target ids ascend with draft ids, as every trainer but ModelOpt's frequency calibration has them."""
    ids = mapped_ids(checkpoint)
    return bool((ids[1:] > ids[:-1]).all())


def map_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is wrong with the map, whoever reads it."""
    facts, config = map_facts(checkpoint), checkpoint.config
    figures = {"draft_vocab": facts.draft_vocab, "vocab": facts.vocab, "stored": facts.stored}
    said = {
        "missing": f"the draft's vocabulary of {facts.draft_vocab} is smaller than the target's of {facts.vocab}, and no map "
        "names its tokens",
        "zero": "the vocabulary map is all zero: the draft's tokens are the first ids of the vocabulary",
        "absolute": "the vocabulary map holds target ids where every stack expects offsets",
        "contradicts": "the map d2t and the mask t2d contradict each other, whichever way d2t is read",
    }
    if facts.stored in said:
        how = " It can be rebuilt from t2d: the i-th true entry minus i." if facts.rebuilt else ""
        yield finding("vocab-map", ["tensor d2t"], said[facts.stored], "proven",
                      "needs-serving" if facts.rebuilt or facts.stored == "absolute" else "needs-retraining",
                      f"{_OFFSETS}. Ship it in the checkpoint.{how}", measured=_READ, result=facts.why, healthy=_SOUND,
                      figures=figures)
        return
    if "d2t" not in checkpoint.tensors:
        return
    ids = mapped_ids(checkpoint)
    beyond = int(((ids < 0) | (ids >= config.vocab_size)).sum())
    if beyond:
        yield finding("vocab-map", ["tensor d2t"], f"{beyond} of {len(ids)} mapped ids lie beyond the vocabulary of "
                      f"{config.vocab_size}", "proven", "needs-retraining", f"{_OFFSETS}. Make it from this target's tokenizer.",
                      measured=_READ, result=facts.why, healthy=_SOUND, figures=figures | {"beyond": beyond})
    twice = len(ids) - len(ids.unique())
    if twice:
        yield finding("vocab-map", ["tensor d2t"], f"the vocabulary map names {twice} tokens twice", "supported",
                      "needs-retraining", f"{_OFFSETS}. Each token belongs to one draft id.", measured=_READ,
                      result=f"{len(ids.unique())} distinct of {len(ids)} ids", healthy=_SOUND,
                      figures=figures | {"twice": twice})
    t2d = checkpoint.tensors.get("t2d")
    if t2d is not None and int(t2d.bool().sum()) != config.draft_vocab_size:
        yield finding("vocab-map", ["tensor t2d"], f"t2d has {int(t2d.bool().sum())} true entries for {config.draft_vocab_size} "
                      "draft ids", "supported", "needs-serving", "Make t2d from d2t: true at every i + d2t[i].", measured=_READ,
                      result=facts.why, healthy=_SOUND, caveats=["engines do not read t2d; trainers that go on from here do"],
                      figures=figures)


def coverage(checkpoint: Checkpoint, frequencies: Tensor) -> float:
    """Share of the counted tokens [V] that the draft can name at all."""
    ids = mapped_ids(checkpoint).unique()
    held = frequencies[ids[(ids >= 0) & (ids < len(frequencies))]]
    return float(held.sum() / frequencies.sum().clamp(min=1))


def read_frequencies(path: Path, vocab: int) -> Tensor:
    """Token counts [V] float64: a torch file or JSON of {id: count}, or a tensor [V] (torch or safetensors, one tensor).

    Raises:
        DraftscopeError: not such a file, or ids beyond the vocabulary.
    """
    held: Any
    if path.suffix == ".json":
        held = read_json(path)
    elif path.suffix == ".safetensors":
        file = TensorFile(path)
        held = file.tensor(sorted(file.names)[0]) if len(file.names) == 1 else None
    else:
        held = load_tensors(path)
    counts = torch.zeros(vocab, dtype=torch.float64)
    if isinstance(held, Tensor) and held.ndim == 1 and len(held) <= vocab and not held.is_complex():
        counts[: len(held)] = held.double()
        return counts
    try:
        pairs = [(int(key), float(value)) for key, value in held.items()]
    except (AttributeError, TypeError, ValueError):
        raise DraftscopeError("holds no token counts", where=str(path),
                              remedy="Give {token id: count} as torch file or JSON, or one tensor [V]") from None
    wrong = next((key for key, _ in pairs if not 0 <= key < vocab), None)
    if wrong is not None:
        raise DraftscopeError(f"counts token {wrong}, the vocabulary has {vocab}", where=str(path),
                              remedy="The counts belong to another tokenizer")
    for key, value in pairs:
        counts[key] = value
    return counts
