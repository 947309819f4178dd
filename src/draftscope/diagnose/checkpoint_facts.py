"""What a draft checkpoint says of itself before anything is run: its vocabulary map, and what it lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.faults.measurements import MapFacts


def poisoned(checkpoint: Checkpoint) -> dict[str, int]:
    """Tensors with NaN or Inf, and how many such values each holds."""
    found = {name: int((~t.isfinite()).sum()) for name, t in checkpoint.tensors.items() if t.dtype.is_floating_point}
    return {name: count for name, count in found.items() if count}


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
    return facts("offset", f"i + d2t[i] lie in 0..{int(offset.max())} of {vocab}")


def rebuilt_ids(checkpoint: Checkpoint) -> Tensor | None:
    """Target ids [D] from `t2d`, whose i-th true entry is draft id i (stacks sort ascending); None without a fitting t2d."""
    t2d = checkpoint.tensors.get("t2d")
    if t2d is None:
        return None
    ids = t2d.bool().nonzero().squeeze(-1)
    return ids if len(ids) == checkpoint.config.draft_vocab_size else None
