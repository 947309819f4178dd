"""draft-kv: the draft's own cache is stale or incomplete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, runs_otherwise, tried_in_vain
from draftscope.faults.shapes import grows_stale
from draftscope.findings import Evidence, Fix

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_MADE: dict[str, dict[str, Any]] = {
    "prompt missing": {"warm": 1},
    "own drafts kept": {"unrefreshed": 0},
    "own drafts kept from round 8": {"unrefreshed": 8},
    "most of the prompt missing": {"warm": 16},
    "shared prefixes missing": {"prefix": 8},
    "drafts not rewound": {"unrewound": "all"},
    "drafts not rewound, counted as positions": {"unrewound": "all", "counted": True},
    "rejected drafts not rewound": {"unrewound": "rejected"},
    "chunk ends with the prompt's last token": {"chunk": 16},
}
_FIXES = {
    "": "Run the draft over every accepted row with its true features and keep nothing else in its cache.",
    "warm": "Run the draft over the whole prompt before its first draft.",
    "prefix": "Run the draft over cached prefixes too, or switch the prefix cache off for requests that are drafted for.",
    "unrefreshed": "After each verify step run the draft over the accepted rows with the target's states, in place of its own.",
    "unrewound": "Set the draft cache's length back to the accepted rows after each verify step.",
    "chunk": "Give the draft, with the last row of a prefill chunk, the token that follows it in the prompt (vLLM's V1 runner "
             "gives "
             "the prompt's last one); or prefill in one chunk (`--max-num-batched-tokens`).",
}


class DraftKv(Fault):
    """Entries that are missing, of the draft's own making, left over, or made with a wrong token."""

    id = "draft-kv"
    title = "the draft's cache is stale"
    verdict = "runtime"
    variants = tuple(_MADE)
    page = Page(
        symptom="Acceptance is low for some requests or falls while a request, or a server, goes on; a restart mends it for a "
                "while.",
        traces={
            "prompt missing": Trace("the engine starts the draft at the prompt's last row: its cache is not warmed up", _TAKES,
                                    "every state other, less as the answer grows; alike with warm=1", "measured"),
            "own drafts kept": Trace("accepted rows keep the entries that were drafted for them", _TAKES,
                                     "each request's first round alike, later ones not; alike with unrefreshed=0", "measured"),
            "own drafts kept from round 8": Trace("the same once a request has gone through so many rounds", _TAKES,
                                                  "first 8 rounds alike, later ones not", "measured"),
            "most of the prompt missing": Trace("only the prompt's last rows were run", _TAKES,
                                                "requests with longer prompts off; alike with warm=16", "measured"),
            "shared prefixes missing": Trace(
                "the target takes a prefix from its cache, the draft has none of it: cache hits alone are wrong", _TAKES,
                "requests whose prompt begins like an earlier one's are off, others alike; alike with prefix=8", "measured"),
            "drafts not rewound": Trace("entries of drafted steps stay in the cache, round after round", _TAKES,
                                        "first round alike, then ever farther off; alike with unrewound=all", "measured"),
            "drafts not rewound, counted as positions": Trace("the same, and they move all later positions", _TAKES,
                                                              "alike with unrewound=all counted", "measured"),
            "rejected drafts not rewound": Trace("only what the accepted rows do not overwrite stays", _TAKES,
                                                 "off after rounds that accepted little", "measured"),
            "chunk ends with the prompt's last token": Trace(
                "the runner gives the draft the prompt's last token at the end of every prefill chunk but the last (vLLM V1)",
                f"{_TAKES}, or a capture with draft_input_ids", "prompts longer than a chunk slightly off; alike with chunk=16",
                "measured"),
        },
        lookalikes={
            "attn-mask": "hidden from draft steps alone: first drafts stay alike",
            "pos-id": "positions after the prompt: right entries at other places; the gate tries both",
            "recur-state": "leaves first drafts alike",
            "req-mix": "the target's states are of other rows: placement shows it, here they match",
            "ctx-limit": "goes by position, not by round or request",
        },
        unseen={
            "entries of other requests": "which ones cannot be known from a capture of single requests: it shows as rounds that "
                                         "no "
                                         "trial explains",
            "drop over hours of uptime": "needs counters over time: capture late, and again after the cache was reset",
        },
        reports=("vLLM issue #41838", "ik_llama.cpp PR #1992", "ATOM PR #882"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._given(m) or from_trials(m, self.id, {"": "draft cache"}, _FIXES) or grows_stale(m, self.id)

    def _given(self, m: Measurements) -> list[Suspicion]:
        """Tokens recorded at the draft's input that are not the text's next ones."""
        facts = m.given
        if facts is None or not facts.prompt_last or facts.prompt_last < facts.other:
            return []
        return [Suspicion(
            fault=self.id, side="serve", where=["draft_input_ids"], strength="proven", runtime=True, recovery="replayed",
            undo=Undo(given=True),
            says="the engine gives the draft the prompt's last token at the end of a prefill chunk, in place of the next one "
            f"({facts.other} of {facts.rows} rows)",
            evidence=[Evidence(
                hypothesis="the draft's entries at the ends of prefill chunks are made with a wrong token",
                prediction="with every row the draft is given the token that follows it in the text",
                measurement="the recorded draft_input_ids against the text",
                result=f"{facts.other} of {facts.rows} rows were given another token, {facts.prompt_last} of them the prompt's "
                f"last; they end blocks of {facts.chunk} rows or a multiple",
                decides="draft-kv, where all of them are the prompt's last token inside the prompt",
                figures={"rows": facts.rows, "other": facts.other, "prompt_last": facts.prompt_last, "chunk": facts.chunk})],
            fix=Fix(says=_FIXES["chunk"]))]

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "a stale cache would leave some rounds alike (first ones, requests without a cached prefix) and "
                                "others not")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in _MADE:
            raise ValueError(f"draft-kv has no variant {variant!r}")
        return runs_otherwise(plant, **_MADE[variant])

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, runtime=Runtime()))
