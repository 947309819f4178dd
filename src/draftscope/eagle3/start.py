"""What a draft starts from: its shape, its vocabulary and its first weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftscope.boundaries import default_boundaries
from draftscope.eagle3.checkpoint import initial_value
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft
from draftscope.errors import DraftscopeError
from draftscope.target.parts import TargetParts


def shape_of(target: Mapping[str, Any], draft_vocab: int, **changes: Any) -> DraftConfig:
    """One layer of the target's own proportions at its default boundaries, with rope theta 10000.

    Args:
        target: the target's flat text config.
        changes: `DraftConfig` fields that are to differ.

    Raises:
        DraftscopeError: the target is too small for default boundaries, and none were given.
    """
    hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
    if "boundaries" not in changes:
        changes["boundaries"] = _defaults(int(target["num_hidden_layers"]))
    fields: dict[str, Any] = {
        "hidden_size": hidden, "target_hidden_size": hidden, "intermediate_size": int(target["intermediate_size"]),
        "num_attention_heads": heads, "num_key_value_heads": int(target.get("num_key_value_heads") or heads),
        "head_dim": int(target.get("head_dim") or hidden // heads), "vocab_size": int(target["vocab_size"]),
        "draft_vocab_size": draft_vocab, "rms_norm_eps": float(target["rms_norm_eps"]),
        "max_position_embeddings": int(target.get("max_position_embeddings") or 2048),
    }
    return DraftConfig(**(fields | changes))


def _defaults(layers: int) -> tuple[int, ...]:
    """Raises DraftscopeError where the three default boundaries are not three, low to high."""
    found = default_boundaries(layers)
    if not 0 < found[0] < found[1] < found[2]:
        raise DraftscopeError(
            f"a target of {layers} layers has no three default boundaries: 2, n/2 and n-3 are {', '.join(map(str, found))}",
            remedy=f"Say what the slots hold with --boundaries, of 0 to {layers}; engines must be told the same",
        )
    return found


def draft_vocabulary(counts: Tensor, size: int) -> tuple[Tensor, Tensor, float]:
    """The `size` most frequent target tokens, ascending.

    Args:
        counts: [V] how often each token occurs in answers; ties go to the lower id, and tokens never seen fill up.

    Returns:
        d2t [D] int64 offsets (target id = i + d2t[i]), t2d [V] bool, and the share of occurrences covered.
    """
    if not 0 < size <= len(counts):
        raise DraftscopeError(f"a draft vocabulary of {size} out of {len(counts)} tokens is not possible")
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[chosen] = True
    total = float(counts.sum())
    return chosen - torch.arange(size), t2d, float(counts[chosen].sum()) / total if total else 1.0


def new_draft(config: DraftConfig, parts: TargetParts, ids: Tensor, column_scale: Tensor | None, seed: int = 0, *,
              near_mean: bool = True) -> Draft:
    """A draft to start from: head and (halved) final norm are the target's, `fc` near the mean of the slots, the rest random.

    Args:
        ids: [D] target ids of the draft vocabulary.
        column_scale: [S, Ht] by which its features will be divided.
        near_mean: False leaves `fc` random and the final norm at ones.
    """
    draft = Draft(config)
    same_width = config.hidden_size == config.target_hidden_size == parts.width
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(initial_value(name, parameter, seed))
        if same_width:
            draft.lm_head.weight.copy_(parts.head[ids])
        if same_width and near_mean:
            # At the target's full scale the first guesses are as sure as they are wrong, which costs the first epoch.
            draft.norm.weight.copy_(parts.norm_weight.float() + parts.norm_offset).mul_(0.5)
        if same_width and near_mean and config.use_aux_hidden_state:
            scale = torch.ones(config.slots, config.hidden_size) if column_scale is None else column_scale
            # Each slot enters at root mean square 1 with its own proportions between columns, and all weigh the same.
            near = scale / scale.square().mean(1, keepdim=True).sqrt() / config.slots
            draft.fc.weight.mul_(0.25).add_(torch.cat([torch.diag(row) for row in near], 1))
        elif near_mean and config.use_aux_hidden_state:
            draft.fc.weight.mul_(50 / (config.slots * config.target_hidden_size) ** 0.5)
    draft.target_ids = ids
    draft.embedding = parts.embedding.float()
    return draft


def folded(draft: Draft, column_scale: Tensor | None) -> Draft:
    """The same draft for features as they come."""
    copy = Draft(draft.config).to(draft.norm.weight.device)
    copy.load_state_dict(draft.state_dict())
    copy.target_ids, copy.embedding = draft.target_ids, draft.embedding
    if column_scale is not None:
        with torch.no_grad():
            copy.fc.weight /= column_scale.flatten().to(copy.fc.weight.device)
    return copy.eval().requires_grad_(False)
