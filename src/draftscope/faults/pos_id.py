"""pos-id: rows or draft steps run at another position than the one they were trained at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, runs_otherwise, tried_in_vain

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_MADE: dict[str, dict[str, Any]] = {
    "not counted from the prompt": {"restart": True},
    "draft steps one too high": {"ahead": 1},
    "draft steps one too low": {"ahead": -1},
    "draft steps do not advance": {"still": True},
    "one too high after the prompt": {"after_prompt": 1},
    "one too low after the prompt": {"after_prompt": -1},
    "counted from the padded prompt": {"padded_to": 64},
}
_FIXES = {
    "": "Run row t of the draft at position t, the position of the token whose target state it holds, and the k-th draft step "
        "after it at t + k.",
    "ahead=+1": "Run the k-th draft step after row t at position t + k. SGLang up to 0.5.11 adds 1 ahead of the forward pass: "
                "update.",
    "still": "Advance positions (and sequence lengths) by one with every draft step.",
    "padded_to": "Count decode positions from the prompt's own length, not from the padded one.",
}


class PosId(Fault):
    """Positions off by one, standing still over draft steps, or counted from the wrong place after the prompt."""

    id = "pos-id"
    title = "wrong positions"
    verdict = "runtime"
    variants = tuple(_MADE)
    page = Page(
        symptom="Acceptance somewhat lower than in training, mostly from the second draft position on; states and weights are "
                "right.",
        traces={
            "not counted from the prompt": Trace("the engine's decode rows count positions from 0 again", _TAKES,
                                                 "every round's states other; alike with restart", "measured"),
            "draft steps one too high": Trace("the engine advances positions before the first drafted step's pass as well as "
                                              "after "
                                              "it (SGLang up to 0.5.11)", _TAKES,
                                              "first drafts alike, later states other; alike with ahead=+1", "measured"),
            "draft steps one too low": Trace("drafted steps begin at the row's own position", _TAKES,
                                             "first drafts alike, later states other; alike with ahead=-1", "measured"),
            "draft steps do not advance": Trace("the engine sets positions once per round", _TAKES,
                                                "two drafts alike, the third not; alike with still", "measured"),
            "one too high after the prompt": Trace("decode rows count the bonus token twice", _TAKES,
                                                   "every round's states slightly other; alike with after_prompt=+1", "measured"),
            "one too low after the prompt": Trace("decode rows begin at the prompt's last position", _TAKES,
                                                  "every round's states slightly other; alike with after_prompt=-1", "measured"),
            "counted from the padded prompt": Trace(
                "decode positions go on from the length that the prompt was padded to", _TAKES,
                "states off by more where the prompt needed more padding; alike with padded_to", "measured"),
        },
        lookalikes={
            "recur-state": "another state fed back: states of the second step fit one of the two alone",
            "rope": "another table is off at every distance, the prompt's included, positions only between the parts that they "
                    "part",
            "draft-kv": "entries missing or stale: a fresh cache mends it, positions do not",
            "attn-mask": "what is not seen: its trial fits alone",
        },
        unseen={
            "all positions moved alike": "a rotary draft sees distances only: speculators trains from position 1, engines count "
                                         "from "
                                         "0, and nothing follows from it",
            "multimodal axes dropped": "on text the three axes are equal; requests with images cannot be captured with their "
                                       "axes",
        },
        reports=("SpecForge issue #414", "sglang PR #21255", "SGLang up to 0.5.11, eagle_worker.draft_forward"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return from_trials(m, self.id, {"": "draft positions"}, _FIXES)

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "positions off by a constant in all rows would leave no trace, since the draft sees distances")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in _MADE:
            raise ValueError(f"pos-id has no variant {variant!r}")
        return runs_otherwise(plant, **_MADE[variant])

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, runtime=Runtime()))
