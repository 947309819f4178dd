"""vLLM's V2 speculator, its own `propose` on the CPU, captured: two requests through a chunked prefill and verify passes.

    python recipes/foreign/second_runner.py OUT [--graphs]

Needs the environment of scripts/env-vllm. The V2 runner wants Triton, so its three kernels and what leads to attention are
stood in for here; the class, its `propose`, the steps that it makes and the batch are vLLM's. The draft is one matrix. Writes
OUT/capture, and OUT/expected.safetensors with what this script worked out by itself. With --graphs the steps after the first
run as a CUDA graph does, without Python's side of the draft.
"""

from __future__ import annotations

import argparse
import contextlib
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from serve import capture_into
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as theirs

K, H, SLOTS, VOCAB, MOST = 3, 4, 3, 31, 16
CPU = torch.device("cpu")


class Draft(torch.nn.Module):
    """Hands out a state before and one after its norm, as vLLM's drafts do."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.fc, self.mix, self.embedding, self.head = (
            torch.nn.Parameter(torch.randn(*shape, generator=draw), requires_grad=False)
            for shape in ((SLOTS * H, H), (H, H), (VOCAB, H), (H, VOCAB)))

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states @ self.fc

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: None,
    ) -> tuple[Tensor, Tensor]:
        before = torch.tanh(hidden_states @ self.mix + self.embedding[input_ids.long()] + positions[:, None] / 10)
        return before * 0.5, before

    def compute_logits(self, states: Tensor) -> Tensor:
        return states @ self.head


def prepare_prefill_inputs(last: Tensor, step: Tensor, buffers: InputBuffers, batch: InputBatch, sampled: Tensor,
                           rejected: Tensor, last_sampled: Tensor, next_prefill: Tensor, most: int) -> Tensor:
    """What vLLM's kernel of that name does, in torch."""
    for r in range(batch.num_reqs):
        start, stop = batch.query_start_loc[r : r + 2].tolist()
        stop -= int(rejected[r])
        at = int(batch.idx_mapping[r])
        buffers.input_ids[start : stop - 1] = batch.input_ids[start + 1 : stop]
        buffers.input_ids[stop - 1] = int(last_sampled.flatten()[at] if sampled[r] > 0 else next_prefill.flatten()[at])
        buffers.positions[start:stop] = batch.positions[start:stop]
        last[r] = stop - 1
    step.zero_()
    return last


def prepare_decode_inputs(drafts: Tensor, lengths: Tensor, rejected: Tensor, buffers: InputBuffers, *others: Any,
                          **named: Any) -> None:
    buffers.input_ids[: len(drafts)] = drafts
    buffers.positions[: len(drafts)] += 1


def update_draft_inputs(drafts: Tensor, step: Tensor, hidden: Tensor, out: Tensor, fed: Tensor, buffers: InputBuffers,
                        sources: Tensor, requests: int, *others: Any, **named: Any) -> None:
    out[:requests, int(step)] = drafts
    buffers.input_ids[:requests] = drafts
    buffers.positions[:requests] += 1
    fed[:requests] = hidden[:requests]


class Graph:
    """Replays a step without calling the draft's module."""

    def __init__(self, speculator: Any) -> None:
        self.speculator = speculator

    def specialize_spec_tokens(self, described: Any, tokens: int) -> Any:
        return described

    def run_fullgraph(self, described: Any) -> None:
        self.speculator.draft_tokens[: described.num_reqs, int(self.speculator.current_draft_step)] = 7


def speculator(graphs: bool) -> Any:
    """An EagleSpeculator as its `__init__` leaves it, with a draft loaded."""
    made = object.__new__(EagleSpeculator)
    made.model, made.method, made.num_speculative_steps, made.max_model_len = Draft(), "eagle3", K, 100
    made.max_num_reqs = made.max_num_tokens = MOST
    made.input_buffers = InputBuffers(MOST, MOST, CPU)
    made.hidden_states = torch.zeros(MOST, H)
    made.current_draft_step = torch.tensor(0)
    made.last_token_indices, made.sample_src_positions, made.idx_mapping, made.seeds = (
        torch.zeros(MOST, dtype=torch.int64) for _ in range(4))
    made.temperature, made.draft_tokens = torch.zeros(MOST), torch.zeros(MOST, K, dtype=torch.int64)
    made.pcp_manager = made.eplb_state = made.draft_logits = made.acceptance_estimator = made.vllm_config = None
    made.prefill_cudagraph_manager = made.draft_watermarker = None
    made.decode_cudagraph_manager = Graph(made) if graphs else None
    made.supports_mm_inputs = made.use_local_argmax_reduction = made.supports_decode_metadata_update = False
    made.enable_adaptive_verification = False
    made.dp_size, made.dp_rank, made.kv_cache_config = 1, 0, None
    made.block_tables = types.SimpleNamespace(compute_slot_mappings=lambda *args: None)
    made._build_uniform_attn_metadata = lambda **named: None
    theirs.prepare_prefill_inputs, theirs.prepare_decode_inputs = prepare_prefill_inputs, prepare_decode_inputs
    theirs.update_draft_inputs, theirs.build_slot_mappings_by_layer = update_draft_inputs, lambda *args: None
    theirs.set_forward_context = lambda *args, **named: contextlib.nullcontext()

    def dispatch(manager: Any, requests: int, tokens: int, uniform_token_count: int | None = None, **named: Any) -> Any:
        graph = manager is not None and uniform_token_count == 1
        return BatchExecutionDescriptor(CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE, tokens, requests), None

    theirs.dispatch_cg_and_sync_dp = dispatch
    return made


def batch(names: list[str], places: list[int], rows: list[list[int]], starts: list[int], padded: int) -> InputBatch:
    """vLLM's InputBatch of these rows, with rows of padding after them."""
    counts = [len(ids) for ids in rows]
    total = sum(counts)
    made = InputBatch.make_dummy(len(names), total, InputBuffers(MOST, MOST, CPU))
    made.req_ids, made.num_tokens_after_padding = names, total + padded
    made.num_scheduled_tokens = np.array(counts, dtype=np.int32)
    made.idx_mapping, made.query_start_loc_np = torch.tensor(places), np.array([0, *np.cumsum(counts)], dtype=np.int32)
    made.query_start_loc = torch.from_numpy(made.query_start_loc_np)
    flat = [(token, start + i) for ids, start in zip(rows, starts, strict=True) for i, token in enumerate(ids)]
    made.input_ids = torch.tensor([token for token, _ in flat] + [0] * padded, dtype=torch.int32)
    made.positions = torch.tensor([position for _, position in flat] + [0] * padded)
    made.seq_lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
    made.seq_lens_cpu_upper_bound = made.seq_lens
    return made


def by_hand(draft: Draft, features: Tensor, position: int, token: int) -> tuple[list[int], Tensor]:
    """Drafts from one row, and the state before the norm behind each."""
    hidden, drafts, states = (features @ draft.fc)[None], [], []
    for step in range(K):
        after, hidden = draft(torch.tensor([token]), torch.tensor([position + step]), hidden, None)
        token = int(draft.compute_logits(after).argmax())
        drafts.append(token)
        states.append(hidden[0])
    return drafts, torch.stack(states)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--graphs", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    capture_into(options.out / "capture")
    import inside

    made = speculator(options.graphs)
    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(method="eagle3", num_speculative_tokens=K),
        model_config=types.SimpleNamespace(max_model_len=100, hf_text_config=types.SimpleNamespace(eos_token_id=None)),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1))
    runner = types.SimpleNamespace(vllm_config=config, speculator=made, model=None, execute_model=lambda output: None)
    worker = types.SimpleNamespace(model_runner=runner, vllm_config=config, rank=0, shutdown=lambda: None)
    inside._attach(worker)

    draw = torch.Generator().manual_seed(1)
    prompts = {"a": [3, 1, 4, 1, 5], "b": [9, 2, 6]}
    places = {"a": 4, "b": 2}  # rows of vLLM's request states
    last_sampled, next_prefill = torch.zeros(MOST, 1, dtype=torch.int64), torch.zeros(1, MOST, dtype=torch.int32)
    expected: dict[str, list[Tensor]] = {}
    drafts: dict[str, list[int]] = {}
    known = {name: list(ids) for name, ids in prompts.items()}
    at = dict.fromkeys(prompts, 0)
    held: dict[str, Tensor] = {}
    new: set[str] = set(prompts)
    # (request, rows of its prompt or None for a verify step, accepted drafts)
    for plan in ([("a", 3, 0), ("b", 3, 0)], [("b", None, 2), ("a", 2, 0)], [("a", None, 0), ("b", None, 3)], [("b", None, 1)]):
        names = [name for name, _, _ in plan]
        rows, sampled, rejected = [], [], []
        for name, chunk, accepted in plan:
            ids = known[name][at[name] : at[name] + chunk] if chunk else [known[name][at[name]], *drafts[name]]
            rows.append(ids)
            if chunk is None:
                known[name] += [*drafts[name][:accepted]]
            complete = at[name] + (chunk or 0) >= len(prompts[name])
            if chunk is None or complete:
                known[name].append(int(torch.randint(0, VOCAB, (), generator=draw)))
                last_sampled[places[name]] = known[name][-1]
            else:
                next_prefill[0, places[name]] = known[name][at[name] + chunk]
            sampled.append(1 + accepted if chunk is None else int(complete))
            rejected.append(K - accepted if chunk is None else 0)
        starts = [at[name] for name in names]
        given = batch(names, [places[name] for name in names], rows, starts, padded=2)
        states = torch.randn(given.num_tokens_after_padding, SLOTS * H, generator=draw)
        sampling = types.SimpleNamespace(max_tokens=None, min_tokens=0, temperature=0.0, ignore_eos=True, stop_token_ids=[])
        requests = [types.SimpleNamespace(req_id=name, prompt_token_ids=prompts[name], sampling_params=sampling)
                    for name in names if name in new]
        new -= set(names)
        runner.execute_model(types.SimpleNamespace(
            finished_req_ids=set(), scheduled_new_reqs=requests,
            scheduled_spec_decode_tokens={name: drafts[name] for name, chunk, _ in plan if chunk is None}))
        made.propose(given, {}, {}, states[:, :H], list(states.split(H, -1)), torch.tensor(sampled), torch.tensor(rejected),
                     last_sampled, next_prefill, torch.zeros(MOST), torch.zeros(MOST, dtype=torch.int64), dummy_run=True)
        made.draft_tokens.fill_(-5)  # of the dummy run, which must not be seen
        out = made.propose(given, {}, {}, states[:, :H], list(states.split(H, -1)), torch.tensor(sampled), torch.tensor(rejected),
                           last_sampled, next_prefill, torch.zeros(MOST), torch.zeros(MOST, dtype=torch.int64))
        first = 0
        for r, (name, chunk, _) in enumerate(plan):
            count, kept = len(rows[r]), len(rows[r]) - rejected[r]
            if chunk is None:
                expected.setdefault(f"{name} draft_states", []).append(held[name])
                expected.setdefault(f"{name} draft_token_ids", []).append(torch.tensor(drafts[name]))
            expected.setdefault(f"{name} fc_input", []).append(states[first : first + count])
            expected.setdefault(f"{name} token_ids", []).append(torch.tensor(rows[r]))
            expected.setdefault(f"{name} accepted", []).append(torch.arange(count) < kept)
            at[name] += kept
            ours, held[name] = by_hand(made.model, states[first + kept - 1], at[name] - 1, known[name][at[name]])
            drafts[name] = out[r].tolist()
            if not options.graphs and drafts[name] != ours:
                raise SystemExit(f"{name}: vLLM drafted {drafts[name]}, by hand it is {ours}")
            first += count
    worker.shutdown()
    stacked = ("draft_states", "draft_token_ids")
    joined = {name: torch.stack(found) if name.endswith(stacked) else torch.cat(found) for name, found in expected.items()}
    save_file(joined, options.out / "expected.safetensors")


if __name__ == "__main__":
    main()
