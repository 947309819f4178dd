"""Which stage of an engine's draft departs first from the checkpoint's: fc, layer, head, vocabulary map, or what is fed back.

Every stage is recomputed from what the engine itself recorded just before it, so that one fault does not spread over the
later ones. N steps of K drafted tokens, H draft width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftscope.eagle3.matching import finite_rows
from draftscope.eagle3.model import Draft, StepMask
from draftscope.states.types import Sequence, Steps

Figures = dict[str, list[Tensor]]


@dataclass(frozen=True, slots=True)
class Stages:
    """Medians of relative errors over rows, and shares of agreeing tokens; None or absent where nothing was recorded.

    Attributes:
        fc_error: what `fc` returned in the engine, against the draft's projection of the recorded features.
        layer_error: the state behind the first drafted token, against the layer run on the engine's own `fc` output (on the
            draft's own projection where that was not recorded).
        head_agreement: by meaning of the vocabulary map (`offset`, `absolute`, `zero`), the share of first drafted tokens
            that equal the argmax of norm and head over the recorded state.
        feedback_error: by state fed back (`pre`, `post` the final norm), the state behind the second drafted token against
            the layer run on the recorded first state and the recorded first token.
        steps: steps compared.
    """

    steps: int
    fc_error: float | None = None
    layer_error: float | None = None
    head_agreement: dict[str, float] = field(default_factory=dict)
    feedback_error: dict[str, float] = field(default_factory=dict)


def stages(draft: Draft, sequences: Iterable[Sequence], *, offsets: Tensor | None = None,
           rebuilt: Tensor | None = None) -> Stages | None:
    """Compare recorded stages with the draft.

    Args:
        draft: as the checkpoint says, with its embedding.
        sequences: with `fc_output`, or with steps that hold `drafted` and `states`; others are passed over.
        offsets: [D] the map as stored in the checkpoint (`d2t`); None = taken back from the draft, which must then have been
            read with offsets.
        rebuilt: [D] target ids by another source than the map, tried as well where they differ from it.

    Returns:
        None where no sequence recorded any stage.
    """
    own = torch.arange(draft.config.draft_vocab_size)
    stored = draft.target_ids - own if offsets is None else offsets.long()
    last = draft.config.vocab_size - 1
    maps = {"offset": (own + stored).clamp(0, last), "absolute": stored.clamp(0, last), "zero": own}
    if rebuilt is not None and not torch.equal(rebuilt, maps["offset"]):
        maps["rebuilt"] = rebuilt
    figures: Figures = {}
    steps = 0
    with torch.no_grad():
        for sequence in sequences:
            steps += _one(draft, sequence, maps, figures)
    if not figures:
        return None
    pooled = {name: torch.cat(found) for name, found in figures.items()}
    return Stages(
        steps=steps, fc_error=_median(pooled.get("fc")), layer_error=_median(pooled.get("layer")),
        head_agreement={n: float(pooled[f"head {n}"].double().mean()) for n in maps if f"head {n}" in pooled},
        feedback_error={n: e for n in ("pre", "post") if (e := _median(pooled.get(f"feedback {n}"))) is not None},
    )


def _one(draft: Draft, sequence: Sequence, maps: dict[str, Tensor], figures: Figures) -> int:
    usable = min(finite_rows(sequence.features), len(sequence.token_ids) - 1)
    if usable < 1 or (sequence.fc_output is None and (sequence.steps is None or sequence.steps.states is None)):
        return 0
    dtype = draft.dtype
    hidden = draft.project(sequence.features[:usable])
    if sequence.fc_output is not None:
        recorded = sequence.fc_output[:usable].to(dtype)
        _add(figures, "fc", relative_error(hidden, recorded))
        hidden = recorded
    steps = sequence.steps
    if steps is None or steps.states is None:
        return 0
    placed = ((steps.start >= 0) & (steps.start < usable)).nonzero().squeeze(-1)
    if not len(placed):
        return 0
    mask = StepMask.of(draft.config)
    output = draft(hidden[None], draft.embed(sequence.draft_inputs(usable))[None], sequence.positions[None, :usable], mask)[0]
    starts, states = steps.start[placed], steps.states[placed].to(dtype)
    _add(figures, "layer", relative_error(output[starts], states[:, 0]))
    if steps.drafted is not None and steps.parents is None:
        _heads(draft, states, steps, placed, maps, figures)
        _feedback(draft, mask, states, steps, placed, sequence.positions, figures)
    return len(placed)


def _heads(draft: Draft, states: Tensor, steps: Steps, placed: Tensor, maps: dict[str, Tensor], figures: Figures) -> None:
    assert steps.drafted is not None
    drafted = steps.drafted[placed, 0]
    best = draft.logits(states[:, 0]).argmax(-1)
    for name, ids in maps.items():
        _add(figures, f"head {name}", (ids[best] == drafted)[drafted >= 0])


def _feedback(
    draft: Draft, mask: StepMask, states: Tensor, steps: Steps, placed: Tensor, positions: Tensor, figures: Figures,
) -> None:
    assert steps.drafted is not None
    if states.shape[1] < 2:
        return
    first, starts = steps.drafted[placed, 0], steps.start[placed]
    held = (first >= 0) & (first < draft.config.vocab_size) & (steps.drafted[placed, 1] >= 0)
    if not bool(held.any()):
        return
    rows, embeds = starts[held][None], draft.embed(first[held])[None]
    for name, state in (("pre", states[held, 0]), ("post", draft.norm(states[held, 0]))):
        output = draft(state[None], embeds, positions[rows] + 1, mask.on(rows))[0]
        _add(figures, f"feedback {name}", relative_error(output, states[held, 1]))


def relative_error(ours: Tensor, recorded: Tensor) -> Tensor:
    """|ours - recorded| / |recorded| per row, [...] float32."""
    return (ours - recorded).norm(dim=-1).float() / recorded.norm(dim=-1).float().clamp(min=torch.finfo(torch.float32).tiny)


def _add(figures: Figures, name: str, found: Tensor) -> None:
    if len(found):
        figures.setdefault(name, []).append(found)


def _median(errors: Tensor | None) -> float | None:
    if errors is None:
        return None
    finite = errors[torch.isfinite(errors)]
    return float(np.median(finite.numpy())) if len(finite) else None
