"""A server's settings that its acceptance depends on, from its own log, its command line, or what it tells of itself.

Only lines that are the server's own arguments count: a log also holds what users typed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from draftscope.engines.definitions import Shape, Version, version
from draftscope.text import visible

ARGUMENTS = ("server_args=", "non-default args", "launch_server", "sglang serve", "vllm serve", "vllm.entrypoints",
             "SpeculativeConfig(", "args: Namespace(", "LLM engine (v", "vLLM API server version")
ENVIRONMENT = re.compile(r"\s{0,80}(?:[+$]\s+)?(?:export\s+|declare\s+-x\s+|env\s+)?SGLANG_SIMULATE_ACC")
REQUEST = re.compile(r"[Rr]eceived request|prompt\s*[:=]|\"messages\"")
NUMBERS = (
    "speculative_num_draft_tokens", "speculative_num_steps", "speculative_eagle_topk", "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc", "num_speculative_tokens", "synthetic_acceptance_length", "SGLANG_SIMULATE_ACC_LEN",
)
WORDS = ("rejection_sample_method", "acceptance_method", "spec_decoding_acceptance_method", "SGLANG_SIMULATE_ACC_METHOD",
         "SGLANG_SIMULATE_ACC_TOKEN_MODE")
_NUMBER = r"(-?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?)(?![\w.])"
_WORD = r"([A-Za-z][\w-]{0,63})"


def _pattern(key: str, value: str) -> re.Pattern[str]:
    name = key.replace("_", "[_-]")
    return re.compile(rf"(?<!\w)(?<!\w-){name}\\{{0,4}}[\"']?\s{{0,4}}(?:[=:]|\s)\s{{0,4}}\\{{0,4}}[\"']?{value}")


_PATTERNS = {key: _pattern(key, _NUMBER) for key in NUMBERS} | {key: _pattern(key, _WORD) for key in WORDS}
_VERSIONS = tuple(re.compile(p) for p in (
    r"vLLM API server version v?(\d[\w.]*)", r"LLM engine \(v(\d[\w.]*)\)", r"\"version\"\s*:\s*\"v?(\d[\w.]*)\""))


@dataclass(frozen=True, slots=True)
class Distortion:
    """A setting under which accepted counts are not those of lossless verification.

    Attributes:
        simulated: the counts are made up, whatever the draft does; else drafts are accepted that exact verification rejects.
        says: what the engine does then.
        undo: what to change.
        source: where in the engine this is decided.
    """

    key: str
    value: str
    simulated: bool
    says: str
    undo: str
    source: str
    where: str = ""


@dataclass(slots=True)
class Settings:
    """What is known of a server, by key; `where` says from which document."""

    found: dict[str, str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    release: Version = ()

    def number(self, key: str) -> float | None:
        value = float(self.found[key]) if key in self.found else math.nan
        return value if math.isfinite(value) else None

    def count(self, key: str) -> int | None:
        """A whole number from 1 to 10,000, else None."""
        value = self.number(key)
        return int(value) if value is not None and value == int(value) and 0 < value <= 10_000 else None

    def shape(self) -> Shape:
        """What SGLang verifies in a step, as set."""
        return Shape(self.count("speculative_num_draft_tokens"), self.count("speculative_num_steps"),
                     self.count("speculative_eagle_topk"))

    def add(self, other: Settings) -> None:
        self.found |= other.found
        self.where |= other.where
        self.release = other.release or self.release


def read_settings(lines: Iterable[str], where: str, *, trusted: bool = False) -> Settings:
    """Settings from the server's own lines; the last that names a key counts.

    Args:
        trusted: every line is the server's own (what it tells of itself, not a log).
    """
    settings = Settings()
    for line in lines:
        if not trusted and not _own(line):
            continue
        for pattern in _VERSIONS:
            if found := pattern.search(line):
                settings.release = version(found[1])
        for key, pattern in _PATTERNS.items():
            for match in pattern.finditer(line):
                settings.found[key], settings.where[key] = match[1], where
    return settings


def _own(line: str) -> bool:
    """Whether a log's line tells the server's arguments or environment."""
    told = any(mark in line for mark in ARGUMENTS) or ("SGLANG_SIMULATE_ACC" in line and ENVIRONMENT.match(line) is not None)
    return told and REQUEST.search(line) is None


def distortions(settings: Settings) -> list[Distortion]:
    """The settings in effect that make accepted counts other than a lossless verification's."""
    out = []
    simulated = settings.number("SGLANG_SIMULATE_ACC_LEN")
    if simulated is not None and simulated > 0:
        method = settings.found.get("SGLANG_SIMULATE_ACC_METHOD", "")
        out.append(Distortion(
            "SGLANG_SIMULATE_ACC_LEN", settings.found["SGLANG_SIMULATE_ACC_LEN"], True,
            "SGLang draws the number of accepted tokens at random around this length, bonus included, and never compares"
            + (f" (method {visible(method, 40)})" if method else ""),
            "unset SGLANG_SIMULATE_ACC_LEN and start the server again",
            "sglang 0.5.5 srt/speculative/spec_utils.py generate_simulated_accept_index; 0.5.23 sample_simulated_acc_len"))
    if settings.found.get("rejection_sample_method") == "synthetic":
        out.append(Distortion(
            "rejection_sample_method", "synthetic", True, "vLLM accepts drafts at preset rates and never compares",
            "leave rejection_sample_method out of the speculative configuration and start the server again",
            "vllm 0.20.2 and 0.32.0 vllm/config/speculative.py RejectionSampleMethod"))
    for key, what in (("speculative_accept_threshold_single", "whose probability under the target is above it"),
                      ("speculative_accept_threshold_acc", "with a probability raised by 1 / it")):
        value = settings.number(key)
        if value is not None and value < 1:
            out.append(Distortion(
                key, settings.found[key], False,
                f"SGLang accepts drafts {what}; greedy requests are compared exactly all the same",
                f"leave --{key.replace('_', '-')} at 1.0", "sglang 0.5.5 srt/speculative/eagle_info.py EagleVerifyInput.verify; "
                "0.5.14 srt/server_args.py; 0.5.23 srt/speculative/eagle_utils.py"))
    for key in ("acceptance_method", "spec_decoding_acceptance_method"):
        if settings.found.get(key) == "typical_acceptance_sampler":
            out.append(Distortion(
                key, "typical_acceptance_sampler", False,
                "vLLM accepts drafts that the target finds typical, not those that it would have sampled",
                f"leave {key} at rejection_sampler", "vllm 0.8.5 vllm/config.py SpeculativeConfig.acceptance_method"))
    return [Distortion(d.key, d.value, d.simulated, d.says, d.undo, d.source, settings.where.get(d.key, "")) for d in out]
