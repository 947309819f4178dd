"""A simulated run of verify steps, and what each release of an engine would print of it: formulas as in its sources.

Written from the releases named at each function, apart from what the package knows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

K = 3


@dataclass
class Simulated:
    """Requests, each a list of how many drafts its verify steps accepted; `cut`: tokens of the last step beyond the text."""

    requests: list[list[int]]
    cut: list[int]

    @property
    def steps(self) -> list[int]:
        return [a for request in self.requests for a in request]

    @property
    def per_position(self) -> tuple[int, ...]:
        return tuple(sum(a > k for a in self.steps) for k in range(K))

    @property
    def length(self) -> float:
        return sum(a + 1 for a in self.steps) / len(self.steps)


def simulate(
    seed: int = 0, requests: int = 12, conditional: tuple[float, ...] = (0.7, 0.55, 0.5), cut: bool = False,
) -> Simulated:
    """Requests of 5 to 40 steps; each draft is accepted with its position's conditional share."""
    random = np.random.default_rng(seed)
    made: list[list[int]] = []
    for _ in range(requests):
        steps = []
        for _ in range(int(random.integers(5, 41))):
            accepted = 0
            while accepted < K and random.random() < conditional[accepted]:
                accepted += 1
            steps.append(accepted)
        made.append(steps)
    return Simulated(made, [int(random.integers(0, steps[-1] + 1)) if cut else 0 for steps in made])


def windows(steps: list[int], size: int = 37) -> list[list[int]]:
    """The steps of each log interval."""
    return [steps[i : i + size] for i in range(0, len(steps), size)]


# -- vLLM -------------------------------------------------------------------------------------------------------------------


def vllm_scrape(run: Simulated, *, engines: int = 1, model: str = "m", drafted: int | None = None) -> str:
    """As 0.20.2 and 0.32.0 expose them through prometheus_client: counters get `_total` and a `_created` beside."""
    out = ["# HELP python_gc_objects_collected_total Objects collected", 'python_gc_objects_collected_total{generation="0"} 9.0']
    for name, value in (("num_drafts", len(run.steps)), ("num_draft_tokens", drafted or K * len(run.steps)),
                        ("num_accepted_tokens", sum(run.steps))):
        full = f"vllm:spec_decode_{name}"
        out += [f"# HELP {full}_total Number of.", f"# TYPE {full}_total counter"]
        shares = [value // engines + (i < value % engines) for i in range(engines)]
        out += [f'{full}_total{{engine="{i}",model_name="{model}"}} {float(share)}' for i, share in enumerate(shares)]
        out += [f'{full}_created{{engine="{i}",model_name="{model}"}} 1.7e+09' for i in range(engines)]
    full = "vllm:spec_decode_num_accepted_tokens_per_pos"
    for k, value in enumerate(run.per_position):
        shares = [value // engines + (i < value % engines) for i in range(engines)]
        out += [f'{full}_total{{engine="{i}",model_name="{model}",position="{k}"}} {float(s)}' for i, s in enumerate(shares)]
    return "\n".join(out) + "\n"


def vllm_line(steps: list[int], release: str, drafted: int | None = None) -> str:
    """`SpecDecodingLogging.log` of 0.8.5, 0.9.0 and 0.32.0."""
    accepted, drafted = sum(steps), drafted or K * len(steps)
    shares = ", ".join(f"{sum(a > k for a in steps) / len(steps):.3f}" for k in range(K))
    mean, rate = accepted / len(steps), accepted / drafted * 100
    head = "INFO 08-04 20:51:08 [metrics.py:120] SpecDecoding metrics: "
    if release in ("0.8.5", "0.9.0"):
        mean += release == "0.9.0"
        return (f"{head}Draft acceptance rate: {rate:.1f}%, Mean acceptance length: {mean:.2f}, Accepted: {accepted} tokens, "
                f"Drafted: {drafted} tokens, Per-position acceptance rate: {shares}")
    return (f"(APIServer pid=1) {head}Mean acceptance length: {1 + mean:.2f}, Accepted throughput: 1.20 tokens/s, Drafted "
            f"throughput: 3.40 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {shares}, Avg Draft acceptance rate: {rate:.1f}%")


def vllm_v0_line(run: Simulated, lucky: int) -> str:
    """0.8.5 `vllm/engine/metrics.py`; `lucky` tokens after a rejection would have been accepted and count as accepted."""
    steps, accepted = run.steps, sum(run.steps) + lucky
    emitted, drafted = sum(a + 1 for a in steps), K * len(steps)
    return (f"INFO 01-01 Speculative metrics: Draft acceptance rate: {accepted / drafted:.3f}, System efficiency: "
            f"{emitted / (len(steps) * (K + 1)):.3f}, Number of speculative tokens: {K}, Number of accepted tokens: {accepted}, "
            f"Number of draft tokens: {drafted}, Number of emitted tokens: {emitted}.")


def vllm_answer(steps: list[int]) -> dict[str, Any]:
    """`RequestSpecDecodeMetrics.to_dict` of 0.32.0 in an answer."""
    histogram = [steps.count(j) for j in range(K + 1)]
    return {"id": "x", "choices": [{"message": {"content": "SGLANG_SIMULATE_ACC_LEN=3"}}], "metrics": {
        "time_to_first_token_ms": None, "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(steps) / len(steps), "draft_acceptance_rate": sum(steps) / (K * len(steps)),
            "acceptance_histogram": histogram, "num_spec_steps": len(steps), "num_accepted_draft_tokens": sum(steps),
            "num_draft_tokens": K * len(steps), "num_spec_tokens": K}}}


# -- SGLang -----------------------------------------------------------------------------------------------------------------


def sglang_rate(steps: list[int], release: str, nodes: int, depth: int = K) -> float:
    """The accept rate of log and gauge: `log_decode_stats` of 0.5.5, 0.5.10 and 0.5.14."""
    accepted, calls = sum(steps), len(steps)
    if release == "0.5.5":
        return (accepted + calls) / (calls * (depth + 1))
    if release == "0.5.10":
        return (accepted + calls) / (calls * nodes)
    return accepted / (calls * (nodes - 1))


def sglang_line(steps: list[int], release: str, nodes: int = K + 1, running: int = 8) -> str:
    length, rate = (sum(steps) + len(steps)) / len(steps), sglang_rate(steps, release, nodes)
    ending = "" if release == "0.5.23" else ", "
    return (f"[2026-01-01 00:00:00 DP0 TP0] Decode batch, #running-req: {running}, #token: 5120, token usage: 0.02, accept len: "
            f"{length:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 120.00, #queue-req: 0{ending}")


def sglang_args(nodes: int = K + 1, depth: int = K, topk: int = 1, single: float = 1.0) -> str:
    return ("[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m', speculative_algorithm='EAGLE3', speculative_num_steps="
            f"{depth}, speculative_eagle_topk={topk}, speculative_num_draft_tokens={nodes}, speculative_accept_threshold_single="
            f"{single}, speculative_accept_threshold_acc=1.0, api_key='secret')")


def sglang_answer(steps: list[int], cut: int, release: str, nodes: int = K + 1) -> dict[str, Any]:
    """`meta_info` as `_calculate_spec_decoding_metrics` of 0.5.5, 0.5.10, 0.5.14 and 0.5.23 fills it."""
    calls, accepted = len(steps), sum(steps)
    proposed = calls * (nodes - 1)
    completion = 1 + accepted + calls - cut
    longest = max(steps)
    histogram = [steps.count(j) for j in range(longest + 1)]
    info: dict[str, Any] = {"id": "x", "prompt_tokens": 5, "completion_tokens": completion, "spec_verify_ct": calls,
                            "spec_accept_length": completion / calls}
    if release == "0.5.5":
        info["spec_accept_rate"] = accepted / (calls * K)
    else:
        info["spec_accept_rate"] = accepted / proposed
    if release == "0.5.10":
        info |= {"spec_accept_token_num": accepted, "spec_draft_token_num": proposed, "spec_accept_histogram": histogram}
    if release in ("0.5.14", "0.5.23"):
        info |= {"spec_num_correct_drafts": accepted, "spec_num_proposed_drafts": proposed,
                 "spec_correct_drafts_histogram": histogram}
    if release == "0.5.14":
        info |= {"spec_accepted_drafts": accepted, "spec_proposed_drafts": proposed, "spec_accept_histogram": histogram}
    return {"text": "accept len: 9.99", "meta_info": info}


def sglang_scrape(run: Simulated, release: str, last: list[int], nodes: int = K + 1) -> str:
    """Gauges of the last interval; counters of finished requests from 0.5.14 on."""
    labels = '{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}'
    out = ["# HELP sglang:spec_accept_length x", "# TYPE sglang:spec_accept_length gauge",
           f"sglang:spec_accept_length{labels} {(sum(last) + len(last)) / len(last)!r}",
           f"sglang:spec_accept_rate{labels} {sglang_rate(last, release, nodes)!r}"]
    if release in ("0.5.14", "0.5.23"):
        made = sum(1 + sum(a + 1 for a in steps) - cut for steps, cut in zip(run.requests, run.cut, strict=True))
        stream = labels[:-1] + (',is_streaming="true"}' if release == "0.5.23" else "}")
        out += [f"sglang:spec_num_steps{labels} {float(K)}", f"sglang:spec_num_draft_tokens{labels} {float(nodes)}",
                f"sglang:spec_verify_calls_total{labels} {float(len(run.steps))}",
                f"sglang:generation_tokens_total{stream} {float(made)}",
                f"sglang:num_requests_total{stream} {float(len(run.requests))}"]
    return "\n".join(out) + "\n"


def sglang_info(length: float, release: str = "0.5.23", *, single: float = 1.0) -> dict[str, Any]:
    return {"model_path": "m", "api_key": "secret", "speculative_num_steps": K, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": K + 1, "speculative_accept_threshold_single": single,
            "internal_states": [{"avg_spec_accept_length": length, "memory_usage": {"weight": 1.0}}], "version": release}
