"""The checkpoint against its target: by the target's config.json alone, or by its embedding and head too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftscope.boundaries import default_boundaries
from draftscope.compare.transforms import gram_error
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.findings import Finding
from draftscope.linting.finding import finding
from draftscope.linting.vocabulary import map_facts, mapped_ids, rebuilt_ids
from draftscope.states.places import Place
from draftscope.states.tensorfile import read_json
from draftscope.target.parts import TargetParts, read_config, read_parts

SAMPLE = 512
SAME = 0.02
"""Relative difference under which two rows are the same row in another dtype."""
MOST, FEW = 0.9, 0.1


@dataclass(slots=True)
class TargetFacts:
    """A target, as far as it was given.

    Attributes:
        parts: embedding and head; None = config.json alone.
    """

    folder: Place
    layers: int
    model_type: str
    width: int
    vocab: int | None
    positions: int | None
    theta: float | None
    quantised: str
    parts: TargetParts | None = None


def know(folder: Place, *, weights: bool) -> TargetFacts:
    """Read a target's config.json, and its parts with `weights`.

    Raises:
        DraftscopeError: one of them can't be read.
    """
    config = read_config(folder)
    whole = read_json(folder / "config.json")
    quantised = (whole if isinstance(whole, dict) else {}).get("quantization_config") or config.get("quantization_config") or {}
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        rope = next(value for value in rope.values() if isinstance(value, dict))
    theta = rope.get("rope_theta") or config.get("rope_theta")
    return TargetFacts(
        folder, int(config["num_hidden_layers"]), str(config["model_type"]), int(config["hidden_size"]),
        _whole(config.get("vocab_size")), _whole(config.get("max_position_embeddings")),
        float(theta) if isinstance(theta, int | float) else None,
        str(quantised.get("quant_method", "yes")) if isinstance(quantised, dict) and quantised else "",
        read_parts(folder) if weights else None,
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def target_findings(checkpoint: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """What does not fit between a checkpoint and its target, whoever reads them."""
    yield from _sizes(checkpoint, target)
    yield from _depth(checkpoint, target)
    if target.parts is not None and target.width == checkpoint.config.hidden_size:
        yield from _head(checkpoint, target.parts.head)


def _sizes(checkpoint: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    config = checkpoint.config
    if config.target_hidden_size != target.width:
        yield finding(
            "schema-width", ["config target_hidden_size"], f"the draft was made for states {config.target_hidden_size} wide, the "
            f"target's are {target.width}", "proven", "needs-retraining", "Serve it with the target that it was trained for",
            measured="target_hidden_size (else hidden_size) against the target's hidden_size",
            result=f"{config.target_hidden_size} and {target.width}", healthy="they are equal",
        )
    if target.vocab is not None and config.vocab_size != target.vocab:
        ids = mapped_ids(checkpoint)
        beyond = int((ids >= target.vocab).sum())
        yield finding(
            "vocab-map" if beyond else "schema-width", ["config vocab_size"],
            f"vocab_size is {config.vocab_size}, the target's {target.vocab}"
            + (f"; {beyond} mapped ids do not exist there" if beyond else ""), "proven" if beyond else "supported",
            "needs-retraining" if beyond else "needs-serving", "Serve it with the target that it was trained for, or, where only "
            "padding differs, set vocab_size to the target's", measured="vocab_size of both, and the mapped ids",
            result=f"{config.vocab_size} and {target.vocab}, mapped ids up to {int(ids.max())}", healthy="they are equal",
        )


def _depth(checkpoint: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    boundaries = checkpoint.config.boundaries
    default = default_boundaries(target.layers)
    if not checkpoint.layer_ids and checkpoint.config.use_aux_hidden_state and len(set(default)) < 3:
        yield finding(
            "layer-set", ["config eagle_config"], f"a target of {target.layers} layers has no three default boundaries "
            f"({list(default)}): slots coincide", "proven", "needs-retraining", "Name the layer ids that it was trained with",
            measured="default boundaries of the target", result=f"{list(default)}", healthy="three different boundaries",
        )
    beyond = [b for b in boundaries or () if checkpoint.layer_ids and not 0 <= b <= target.layers]
    if beyond:
        yield finding(
            "layer-set", [f"config {checkpoint.layer_ids_key or 'eagle_config'}"], f"boundaries {beyond} do not exist in a "
            f"target of {target.layers} layers", "proven", "needs-serving", "Serve it with its own target, or write the "
            "ids that belong to this one", measured="layer ids against the target's depth",
            result=f"{list(checkpoint.layer_ids or ())} under {checkpoint.layer_ids_key}",
            healthy=f"boundaries lie in 0..{target.layers}",
        )


@dataclass(slots=True)
class HeadFacts:
    """Share of the draft's head rows that equal the target's row at the id that each reading of the map gives."""

    shares: dict[str, float] = field(default_factory=dict)
    rows: int = 0


def head_facts(checkpoint: Checkpoint, head: Tensor) -> HeadFacts | None:
    """Compare head rows; None where the draft has no head of the target's width."""
    own = checkpoint.tensors.get("lm_head.weight")
    if own is None or own.shape[1] != head.shape[1]:
        return None
    size = len(own)
    rows = torch.arange(0, size, max(1, size // SAMPLE))
    d2t = checkpoint.tensors.get("d2t")
    ids = {"offset": mapped_ids(checkpoint)[rows], "own id": rows}
    if d2t is not None:
        ids["absolute"] = d2t.long()[rows]
    rebuilt = rebuilt_ids(checkpoint)
    if rebuilt is not None:
        ids["t2d"] = rebuilt[rows]
    held = own[rows].float()
    shares = {}
    for name, picked in ids.items():
        inside = (picked >= 0) & (picked < len(head))
        theirs = head[picked.clamp(0, len(head) - 1)].float()
        close = (held - theirs).norm(dim=1) <= SAME * theirs.norm(dim=1).clamp(min=1e-12)
        shares[name] = float((close & inside).float().mean())
    return HeadFacts(shares, len(rows))


def _head(checkpoint: Checkpoint, head: Tensor) -> Iterator[Finding]:
    """A head cut from the target's shows by its rows which ids it was cut at."""
    found = head_facts(checkpoint, head)
    if found is None or found.shares["offset"] >= MOST:
        return
    best = max(found.shares, key=lambda name: found.shares[name])
    if found.shares[best] < MOST or found.shares["offset"] > FEW + found.shares[best] / 2:
        return
    result = ", ".join(f"{name}: {share:.0%}" for name, share in found.shares.items()) + f" of {found.rows} rows"
    common = {"measured": "rows of lm_head against the target's rows at the ids that each reading of the map names",
              "result": result, "healthy": "a head cut from the target's has the rows of its own tokens"}
    if best == "absolute" and map_facts(checkpoint).stored != "absolute":
        yield finding(
            "vocab-map", ["tensor lm_head.weight"], "row i of the head is the target's row d2t[i], not i + d2t[i]: offsets were "
            "taken for ids when the head was cut", "proven", "needs-serving", "Cut the head again: row i is the target's row "
            "i + d2t[i]. If it is the map that holds ids, subtract i instead", figures=found.shares, **common,  # type: ignore[arg-type]
        )
    else:
        says = {"absolute": "the head's rows are those of the ids d2t[i]: the map holds ids where every stack adds them to i",
                "own id": "the head's rows are the target's first rows: it was cut without a map",
                "t2d": "the head's rows are those that t2d selects in ascending order, and d2t names others"}[best]
        yield finding("vocab-map", ["tensor d2t", "tensor lm_head.weight"], says, "proven", "needs-serving",
                      "Make map and head agree: row i of the head is the target's row i + d2t[i]", figures=found.shares,
                      **common)  # type: ignore[arg-type]


def turned_embedding(checkpoint: Checkpoint, parts: TargetParts) -> float | None:
    """How far the cosines between rows of the draft's embedding are from those between the target's; None as `same_embedding`."""
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is None or own.shape != parts.embedding.shape:
        return None
    rows = torch.linspace(0, len(own) - 1, min(len(own), SAMPLE)).long()
    return gram_error(own[rows].float(), parts.embedding[rows].float())


def same_embedding(checkpoint: Checkpoint, parts: TargetParts) -> float | None:
    """Share of the draft's embedding rows that equal the target's; None where it has none of that shape."""
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is None or own.shape[1] != parts.embedding.shape[1]:
        return None
    rows = torch.arange(0, min(len(own), len(parts.embedding)), max(1, len(own) // (8 * SAMPLE)))
    held, theirs = own[rows].float(), parts.embedding[rows].float()
    return float(((held - theirs).norm(dim=1) <= SAME * theirs.norm(dim=1).clamp(min=1e-12)).float().mean())
