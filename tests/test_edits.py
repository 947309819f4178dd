"""Counterfactual edits: what they say, and that each undoes the fault that it is the opposite of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from serving import WIDTH, served, small_draft

from draftscope.eagle3.edits import Edits
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replay import replay
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.types import Sequence

K = 3


def accepted(draft: object, sequence: Sequence) -> dict[int, int]:
    found = replay(draft, [sequence], k=K).sequences[0].answer
    return dict(zip(found.rows.tolist(), found.accepted.tolist(), strict=True))


def test_every_form_is_parsed() -> None:
    edits = Edits.parse(
        ["norm_output=true slots=1,2,0", "scale.2=8", "shift=-1", "d2t=zero", "sliding_window=64", "lost=fc.,lm_head."]
    )
    assert edits == Edits(
        settings={"norm_output": True, "sliding_window": 64}, slots=(1, 2, 0), scale={2: 8.0}, shift=-1, d2t="zero",
        lost=("fc.", "lm_head."), words=edits.words,
    )
    assert edits.words[:2] == ("norm_output=true", "slots=1,2,0") and edits and not Edits.parse([])
    assert Edits.parse(["boundaries=2,15,27"]).settings == {"boundaries": (2, 15, 27)}
    assert Edits.parse(["sliding_window=none"]).settings == {"sliding_window": None}
    rope = Edits.parse(['rope_parameters={"rope_type":"default","rope_theta":5e5}']).settings["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("word", "says"),
    [("nom_output=1", "no key 'nom_output'.*Known: .*norm_output"), ("shift", "not KEY=VALUE"), ("shift=", "not KEY=VALUE"),
     ("slots=a,b", "not a whole number"), ("scale.x=2", "not a whole number"), ("scale.1=x", "not a number"),
     ("d2t=none", "none of offset, absolute, zero"), ("feedback=mid", "none of pre, post"), ("norm_output=maybe", "boolean"),
     ("rms_norm_eps=small", "number")],
)
def test_what_cannot_be_meant_is_refused(word: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"(?i){says}"):
        Edits.parse([word])


def test_the_reading_is_the_base_with_the_edits_on_top() -> None:
    base = Reading(settings={"fc_norm": True, "norm_output": False}, d2t="zero", feedback="post", lost=("fc.",), seed=4)
    assert Edits().reading(base) == base
    assert Edits.parse(["d2t=offset", "lost=norm."]).reading(base) == replace(base, d2t="offset", lost=("fc.", "norm."))
    named = Edits.parse(["norm_output=false"]).reading(base)
    assert named.feedback is None and named.settings == {"fc_norm": True, "norm_output": False}
    assert Edits.parse(["feedback=pre"]).reading().feedback == "pre"


def test_slots_scale_and_states_undo_what_was_done_to_them() -> None:
    draft = small_draft()
    clean = served(draft, 31)
    mixed = replace(clean, features=clean.features[:, [2, 0, 1]] * torch.tensor([1.0, 8.0, 1.0])[:, None])
    repaired = Edits.parse(["slots=1,2,0", "scale.0=0.125"]).apply(mixed)
    assert torch.equal(repaired.features, clean.features) and repaired.fc_output is None
    assert accepted(draft, mixed) != accepted(draft, clean) == accepted(draft, repaired)
    lost = replace(clean, features=clean.features * torch.tensor([1.0, 0.0, 1.0])[:, None])
    own = Edits(states={1: lambda sequence: clean.features[:, 1]})
    assert torch.equal(own.apply(lost).features, clean.features) and lost.features[:, 1].abs().max() == 0
    assert Edits.parse(["d2t=zero"]).apply(clean) is clean


def test_bfloat16_states_are_scaled_in_float32() -> None:
    sequence = replace(served(small_draft(), 3), features=torch.full((4, 3, WIDTH), 1 / 3, dtype=torch.bfloat16))
    edited = Edits.parse(["scale.1=0.1"]).apply(sequence)
    assert edited.features.dtype == torch.float32
    assert torch.equal(edited.features[:, 1], sequence.features[:, 1].float() * 0.1)
    assert sequence.features.dtype == torch.bfloat16


@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_a_shift_undoes_a_lag_on_the_rows_that_have_their_state(lag: int) -> None:
    draft = small_draft()
    clean = served(draft, 32, prompt=1, rounds=9)
    rows = len(clean.features)
    source = torch.arange(rows) + lag
    lagged = replace(clean, features=clean.features[source.clamp(0, rows - 1)])
    repaired = Edits(shift=-lag).apply(lagged)
    before, after = accepted(draft, clean), accepted(draft, repaired)
    assert set(after) == {t for t in before if (t - lag >= 0 and lag > 0) or (t - lag < rows and lag < 0)}
    if lag < 0:
        assert torch.equal(repaired.features[:rows + lag], clean.features[: rows + lag])
        assert all(after[t] == before[t] for t in after)
    else:
        assert torch.equal(repaired.features[lag:], clean.features[lag:])
    steps = replay(draft, [repaired], k=K).sequences[0].steps
    assert steps.unplaced == len(clean.steps.start) - len(steps.recorded)
    assert lag < 0 or (steps.outcome.rows >= lag).all()
    assert accepted(draft, lagged) != before or np.allclose(lagged.features, clean.features)


def test_slots_that_do_not_exist_are_refused() -> None:
    sequence = served(small_draft(), 3)
    for edits in (Edits.parse(["slots=0,1,3"]), Edits.parse(["scale.3=2"]), Edits(states={5: lambda s: s.features[:, 0]})):
        with pytest.raises(DraftscopeError, match=r"r3: there is no slot \d; these states have 3"):
            edits.apply(sequence)
    with pytest.raises(DraftscopeError, match="states for slot 0"):
        Edits(states={0: lambda s: s.features[:2, 0]}).apply(sequence)
