"""What the checkpoint's files say by themselves: values that nobody trained, grids that they lie on, what they were made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftscope.diagnose.ladder import Ladder, Repair
from draftscope.eagle3.altered import FP8, GROUP, map_ids, matrices
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.eagle3.replay import replay
from draftscope.faults.facts_checkpoint import Apart, CheckpointFacts
from draftscope.linting.target import head_facts, know
from draftscope.linting.values import initial_looks
from draftscope.states.types import Sequence
from draftscope.target.parts import TargetParts

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

SAMPLED = 256
"""Rows of a matrix that are looked at."""
SMALL = 24
"""Codes up to which the rounding of the stored values is small beside a step of the grid."""
ON_GRID = 0.12
"""Mean distance to the grid, in steps, below which values lie on it; of values that do not it is a quarter."""
MASK_KEYS = ("mask_token_id", "eagle_config.mask_token_id", "dflash_config.mask_token_id")


def read_files(examination: Examination) -> None:
    """The figures that need the checkpoint alone, and the target's ends where they are at hand."""
    case, m = examination.case, examination.m
    if case.checkpoint is None:
        return
    m.checkpoint = file_facts(case.checkpoint, case.parts)
    if case.inputs.target is not None and case.parts is not None:
        m.checkpoint.quantised_target = know(case.inputs.target, weights=False).quantised


def file_facts(checkpoint: Checkpoint, parts: TargetParts | None) -> CheckpointFacts:
    """Facts of the files."""
    config, tensors = checkpoint.config, checkpoint.tensors
    ones, norms, drawn = initial_looks(checkpoint)
    named = matrices(tensors)
    rows = None if parts is None else head_facts(checkpoint, parts.head)
    ids = map_ids(tensors, config)
    smaller = config.draft_vocab_size < config.vocab_size
    return CheckpointFacts(
        ones=tuple(ones), norms=norms, drawn=tuple(drawn), matrices=len(named),
        grids={name: how for name in named if (how := grid(tensors[name])) is not None},
        tied=bool(checkpoint.raw.get("tie_word_embeddings")), own_head="lm_head.weight" in tensors, whole=not smaller,
        head_rows={} if rows is None else rows.shares, mask_token=_mask_token(checkpoint),
        idle=tuple(name for name in checkpoint.unexpected),
        first_ids=smaller and "d2t" in tensors and torch.equal(ids, torch.arange(len(ids))),
    )


def _mask_token(checkpoint: Checkpoint) -> tuple[int, int] | None:
    own = checkpoint.tensors.get("embed_tokens.weight")
    size = checkpoint.config.vocab_size if own is None else len(own)
    for key in MASK_KEYS:
        inner: object = checkpoint.raw
        for part in key.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        if isinstance(inner, int) and not isinstance(inner, bool) and not 0 <= inner < size:
            return inner, size
    return None


def grid(tensor: Tensor) -> str | None:
    """The format on whose grid a matrix lies: codes (whole numbers), e4m3 without a scale, 8 bits by row, 4 bits by group."""
    rows = tensor[:: max(1, len(tensor) // SAMPLED)].float()
    if tensor.ndim != 2 or not bool(rows.isfinite().all()) or not bool(rows.any()):
        return None
    if bool((rows == rows.round()).all()) and float(rows.abs().max()) > 2:
        return "codes"
    if bool((rows.clamp(-448, 448).to(FP8).float() == rows).all()):
        return "fp8"
    # Few values are enough for four bits to fit eight as well, so the narrower grid is asked first.
    if _steps(F.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP)), 7) < ON_GRID:
        return "int4"
    return "int8" if _steps(rows, 127) < ON_GRID else None


def _steps(rows: Tensor, most: int) -> float:
    """Mean distance to the grid of `most` steps to the largest value, in steps, over small codes beyond zero."""
    steps = rows / (rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most)
    chosen = steps[(steps.abs() > 0.3) & (steps.abs() <= min(SMALL, most - 0.5))]
    return float((chosen - chosen.round()).abs().mean()) if len(chosen) >= 64 else 1.0


def covered(examination: Examination) -> None:
    """How much of the training answers the draft's vocabulary names, and how much the best of its size would."""
    case, m = examination.case, examination.m
    if case.checkpoint is None or m.checkpoint is None or m.checkpoint.whole or case.train is None:
        return
    tokens = torch.cat([_answers(sequence) for sequence in case.train.sequences])
    if not len(tokens):
        return
    counts = torch.bincount(tokens, minlength=case.checkpoint.config.vocab_size)[: case.checkpoint.config.vocab_size].double()
    ids = map_ids(case.checkpoint.tensors, case.checkpoint.config).unique()
    m.checkpoint.covered = float(counts[ids].sum() / counts.sum())
    m.checkpoint.coverable = float(counts.topk(min(len(ids), len(counts))).values.sum() / counts.sum())


def _answers(sequence: Sequence) -> Tensor:
    tokens = sequence.token_ids
    return tokens if sequence.answer is None else tokens[: len(sequence.answer)][sequence.answer[: len(tokens)].bool()]


def compare_source(examination: Examination, ladder: Ladder | None) -> None:
    """The checkpoint against the one that it was made from, tensor by tensor, and both on the training states."""
    case, m = examination.case, examination.m
    source = case.source
    if source is None or case.checkpoint is None or m.checkpoint is None:
        return
    m.checkpoint.apart = apart = tensor_wise(source, case.checkpoint)
    examination.steps.append(
        f"the source draft: {apart.tensors} tensors compared, {len(apart.differing)} differ, {len(apart.absent)} are not here, "
        f"{len(apart.added)} are new; switches that differ: {', '.join(apart.settings) or 'none'}")
    chosen = case.heldout or case.train
    if not (apart.differing or apart.absent or apart.settings) or ladder is None or chosen is None or "trained" not in m.rungs:
        return
    from draftscope.eagle3.checkpoint import build_draft

    if source.missing and source.missing != ("t2d",):
        return
    other = replay(build_draft(source, case.parts), chosen.sequences, parts=case.parts, k=case.k).rung()
    own = ladder.trained(Repair()).rung()
    m.checkpoint.apart = Apart(apart.differing, apart.absent, apart.added, apart.settings, apart.tensors, own.nll, other.nll,
                               own.length, other.length)


def tensor_wise(source: Checkpoint, here: Checkpoint) -> Apart:
    """What differs between two checkpoints of one draft: relative differences of tensors, switches."""
    differing: dict[str, float] = {}
    mine, theirs = {**here.idle, **here.tensors}, {**source.idle, **source.tensors}
    for name in sorted(set(mine) & set(theirs)):
        one, two = mine[name], theirs[name]
        if one.shape != two.shape:
            differing[name] = float("inf")
            continue
        wide = torch.promote_types(one.dtype, two.dtype)
        if torch.equal(one.to(wide), two.to(wide)):
            continue
        apart = (one.double() - two.double()).norm() / two.double().norm().clamp(min=1e-30)
        differing[name] = float(apart)
    was, now = source.config.model_dump(), here.config.model_dump()
    settings = {key: (was[key], now[key]) for key in was if was[key] != now[key] and key != "dialect"}
    return Apart(differing, tuple(sorted(set(theirs) - set(mine))), tuple(sorted(set(mine) - set(theirs))), settings,
                 len(set(mine) & set(theirs)))
