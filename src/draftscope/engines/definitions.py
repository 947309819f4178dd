"""What each figure counts that an engine reports of its acceptance: facts as data, each with its source, by release.

Ours are two (README.md): accept length = mean tokens per verify step, bonus included; acceptance per position, joint and
conditional. Each definition converts its figure to an accept length. Releases in between those read count as the lower one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from draftscope.text import number

Seen = Literal["log", "gauge", "counter", "request", "server info"]
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is verified in one step of one request.

    Attributes:
        nodes: tokens, the root (the last step's bonus) included: SGLang's `speculative_num_draft_tokens`.
        steps: tokens drafted one after the other, K of a chain: SGLang's `speculative_num_steps`, vLLM's
            `num_speculative_tokens`.
        topk: candidates per draft step; 1 = a chain.
    """

    nodes: int | None = None
    steps: int | None = None
    topk: int | None = None

    @property
    def tree(self) -> bool:
        """Whether more is verified than one chain."""
        return (self.topk or 1) > 1 or (self.nodes is not None and self.steps is not None and self.nodes > self.steps + 1)

    @property
    def k(self) -> int | None:
        """The most drafts that one step can accept."""
        if self.steps is not None and self.nodes is not None:
            return min(self.steps, self.nodes - 1)
        return self.steps if self.nodes is None or self.tree else self.nodes - 1

    def words(self) -> str:
        """`4 draft tokens`, `a tree of 16 draft tokens, 5 steps deep`."""
        if self.nodes is None:
            return "" if self.steps is None else f"{self.steps} draft steps"
        if self.tree:
            return f"a tree of {self.nodes} draft tokens" + ("" if self.steps is None else f", {self.steps} steps deep")
        return f"{self.nodes} draft tokens"


Convert = Callable[[float, Shape], float | None]


@dataclass(frozen=True, slots=True)
class Definition:
    """What a reported figure counts.

    Attributes:
        engine, name: as people call it.
        seen: where it is printed.
        first, last: releases read that have it; later ones than `last` count as `last` unless another definition follows.
        counts: the formula in words.
        bonus: whether the token is counted that the target itself adds in each verify step.
        prefill: whether the token is counted that comes from prefill, before any verify step.
        to_length: (value, shape) -> accept length; None where the shape is not known.
        source: file and function, in the release `first` (and `last`, where it moved).
    """

    engine: str
    name: str
    seen: tuple[Seen, ...]
    first: Version
    last: Version
    counts: str
    bonus: bool
    prefill: bool
    to_length: Convert
    source: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as reported, with its definition.

    Attributes:
        converted: the accept length it stands for, where that takes counts that are known beside it; else by its definition.
    """

    definition: Definition
    value: float
    shape: Shape
    note: str = ""
    converted: float | None = None

    @property
    def length(self) -> float | None:
        """The accept length it stands for; None where it is none, or the shape is not known."""
        return self.definition.to_length(self.value, self.shape) if self.converted is None else self.converted

    def says(self) -> str:
        """Both figures, as `SGLang's accept rate 0.19 at 4 draft tokens = accept length 1.57 (what it counts)`."""
        known = self.definition
        at = f" at {self.shape.words()}" if self.shape.words() else ""
        meaning = f" = accept length {number(self.length)}"
        if self.length is None:
            meaning = "" if known.to_length is _unknown else ", not convertible without the number of draft tokens"
        extra = "" if not self.note else f"; {self.note}"
        counted = "bonus counted" if known.bonus else "bonus not counted"
        prefill = ", so is the token of prefill" if known.prefill else ""
        name = f"{NAMES[known.engine]}'s {known.name} {self.value:.3g}{at}"
        return f"{name}{meaning} ({known.counts}; {counted}{prefill}{extra})"


NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


def version(text: str) -> Version:
    """`0.5.10.post1` as (0, 5, 10); () where it does not begin with a number."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def _itself(value: float, _: Shape) -> float:
    return value


def _per_node(value: float, shape: Shape) -> float | None:
    return None if shape.nodes is None else value * shape.nodes


def _per_step_and_bonus(value: float, shape: Shape) -> float | None:
    return None if shape.steps is None else value * (shape.steps + 1)


def _per_draft(value: float, shape: Shape) -> float | None:
    return None if shape.nodes is None else 1 + value * (shape.nodes - 1)


def _per_step(value: float, shape: Shape) -> float | None:
    return None if shape.steps is None else 1 + value * shape.steps


def _without_bonus(value: float, _: Shape) -> float:
    return 1 + value


def _unknown(_: float, __: Shape) -> None:
    return None


_MIXIN = "srt/managers/scheduler_metrics_mixin.py SchedulerMetricsMixin.log_decode_stats"
_REPORTER = "srt/managers/scheduler_components/metrics_reporter.py"
_REQUEST = "srt/managers/tokenizer_manager.py _calculate_spec_decoding_metrics"
_OPEN: Version = (9999,)

SGLANG_LENGTH = Definition(
    "sglang", "accept len", ("log", "gauge", "server info"), (0, 5, 5), _OPEN,
    "(accepted drafts + one bonus a step) / verify steps",
    True, False, _itself, f"sglang 0.5.5 {_MIXIN}, update_spec_metrics; 0.5.23 {_REPORTER} log_decode_stats")

SGLANG_RATES = (
    Definition(
        "sglang", "accept rate", ("log", "gauge"), (0, 5, 5), (0, 5, 5),
        "(accepted drafts + one bonus a step) / (verify steps x (draft steps + 1))", True, False, _per_step_and_bonus,
        f"sglang 0.5.5 {_MIXIN}"),
    Definition(
        "sglang", "accept rate", ("log", "gauge"), (0, 5, 6), (0, 5, 10),
        "(accepted drafts + one bonus a step) / (verify steps x draft tokens)", True, False, _per_node,
        f"sglang 0.5.6, 0.5.7, 0.5.8 {_MIXIN}; 0.5.10 srt/observability/scheduler_metrics_mixin.py"),
    Definition(
        "sglang", "accept rate", ("log", "gauge"), (0, 5, 11), _OPEN,
        "accepted drafts / (verify steps x (draft tokens - 1))", False, False, _per_draft,
        f"sglang 0.5.11, 0.5.12 srt/observability/scheduler_metrics_mixin.py; 0.5.14, 0.5.23 {_REPORTER}"),
)
"""Three meanings under one name; a tree's nodes all count in the denominator, so the rate falls as the tree grows."""

SGLANG_REQUEST_RATES = (
    Definition(
        "sglang", "spec_accept_rate", ("request",), (0, 5, 5), (0, 5, 5), "accepted drafts / (verify steps x draft steps)",
        False, False, _per_step, f"sglang 0.5.5 {_REQUEST}"),
    Definition(
        "sglang", "spec_accept_rate", ("request",), (0, 5, 6), _OPEN,
        "accepted drafts / (verify steps x (draft tokens - 1))", False, False, _per_draft,
        f"sglang 0.5.6, 0.5.10, 0.5.14, 0.5.23 {_REQUEST}"),
)

SGLANG_REQUEST_LENGTH = Definition(
    "sglang", "spec_accept_length", ("request",), (0, 5, 5), _OPEN,
    "completion tokens / verify steps; tokens of a last step beyond the end of its text are not in it", True, True, _itself,
    f"sglang 0.5.5 and 0.5.23 {_REQUEST}")

SGLANG_CALLS = Definition(
    "sglang", "generation_tokens over spec_verify_calls", ("counter",), (0, 5, 14), _OPEN,
    "generated tokens of finished requests / their verify steps", True, True, _itself,
    "sglang 0.5.14 and 0.5.23 srt/observability/metrics_collector.py TokenizerMetricsCollector.observe_one_finished_request")

VLLM_LENGTHS = (
    Definition(
        "vllm", "mean acceptance length", ("log",), (0, 8, 5), (0, 8, 5), "accepted drafts / verify steps", False, False,
        _without_bonus, "vllm 0.8.5 vllm/v1/spec_decode/metrics.py SpecDecodingLogging.log"),
    Definition(
        "vllm", "mean acceptance length", ("log", "request"), (0, 9, 0), _OPEN, "1 + accepted drafts / verify steps", True, False,
        _itself, "vllm 0.9.0, 0.10.0, 0.20.2, 0.32.0 vllm/v1/spec_decode/metrics.py SpecDecodingLogging.log; 0.32.0 "
        "vllm/v1/metrics/stats.py RequestSpecDecodeMetrics.to_dict"),
)

VLLM_RATE = Definition(
    "vllm", "draft acceptance rate", ("log", "request"), (0, 8, 5), _OPEN,
    "accepted drafts / drafts verified, those after the first rejection included", False, False, _per_step,
    "vllm 0.8.5 to 0.32.0 vllm/v1/spec_decode/metrics.py SpecDecodingLogging.log")

VLLM_POSITIONS = Definition(
    "vllm", "per-position acceptance rate", ("log",), (0, 8, 5), _OPEN,
    "steps that accepted position k / all verify steps: unconditional, hence our joint", False, False, _unknown,
    "vllm 0.8.5 to 0.32.0 vllm/v1/spec_decode/metrics.py SpecDecodingStats.observe_draft")

VLLM_COUNTERS = Definition(
    "vllm", "spec_decode counters", ("counter",), (0, 8, 5), _OPEN,
    "num_drafts counts verify steps of requests, num_accepted_tokens_per_pos[k] the steps that accepted position k", False, False,
    _unknown, "vllm 0.8.5 to 0.32.0 vllm/v1/spec_decode/metrics.py SpecDecodingProm")

VLLM_V0_RATE = Definition(
    "vllm", "V0 draft acceptance rate", ("log", "gauge"), (0, 5, 0), (0, 9, 0),
    "every drafted token that the target would have taken, after a rejection too, / drafts: no acceptance of ours", False, False,
    _unknown, "vllm 0.8.5 vllm/spec_decode/metrics.py SpecDecodeWorkerMetrics")

VLLM_V0_EFFICIENCY = Definition(
    "vllm", "V0 system efficiency", ("log", "gauge"), (0, 5, 0), (0, 9, 0),
    "emitted tokens / (verify steps x (K + 1)), since the start", True, False, _per_step_and_bonus,
    "vllm 0.8.5 vllm/spec_decode/metrics.py AsyncMetricsCollector._collect_rejsample_metrics")

DEFINITIONS = (
    SGLANG_LENGTH, *SGLANG_RATES, *SGLANG_REQUEST_RATES, SGLANG_REQUEST_LENGTH, SGLANG_CALLS, *VLLM_LENGTHS, VLLM_RATE,
    VLLM_POSITIONS, VLLM_COUNTERS, VLLM_V0_RATE, VLLM_V0_EFFICIENCY,
)


def of_version(candidates: tuple[Definition, ...], release: Version) -> Definition | None:
    """The definition in a release; None where the release is not known and there are several."""
    if len(candidates) == 1:
        return candidates[0]
    if not release:
        return None
    older = [d for d in candidates if d.first <= release]
    return older[-1] if older else candidates[0]
