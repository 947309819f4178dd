"""The draft at work in vLLM: a plain capture of what its `fc` receives, and the engine's own counters.

    python recipes/foreign/serve.py TARGET DRAFT OUT [--prompts 12] [--tokens 64] [--k 3]

Needs the environment of scripts/env-vllm. Writes OUT/capture/request-NNN.safetensors and OUT/counters.txt (Prometheus text).
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

import torch
from conversations import SERVED, greedy
from safetensors.torch import save_file


class Recorder:
    """Rows of every request, noted between the target's forward pass and the draft's.

    vLLM's V1 runner calls `propose` once an engine step, with the rows of all requests end to end. In a verify step a request
    has the last bonus token's row, then those of its drafts, the rejected ones still among them.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.fc_input = torch.empty(0)
        drafter = runner.drafter
        combine, propose = drafter.model.combine_hidden_states, drafter.propose

        def combined(states: torch.Tensor) -> torch.Tensor:
            self.fc_input = states.detach().clone()
            return combine(states)

        def proposed(*args: Any, **named: Any) -> torch.Tensor:
            # Its later steps overwrite the batch's bounds and positions in place.
            bounds, positions = named["common_attn_metadata"].query_start_loc_cpu.tolist(), named["target_positions"].clone()
            drafts = propose(*args, **named)
            self.note(bounds, positions, **named)
            return drafts

        drafter.model.combine_hidden_states, drafter.propose = combined, proposed

    def note(self, bounds: list[int], positions: torch.Tensor, *, target_token_ids: torch.Tensor, next_token_ids: torch.Tensor,
             num_rejected_tokens_gpu: torch.Tensor | None, **others: Any) -> None:
        if num_rejected_tokens_gpu is None:
            num_rejected_tokens_gpu = torch.zeros(len(bounds) - 1, dtype=torch.int64)
        prompts = self.runner.requests
        for i, name in enumerate(self.runner.input_batch.req_ids):
            rows = slice(bounds[i], bounds[i + 1])
            count = bounds[i + 1] - bounds[i]
            self.rows[name].append({
                "fc_input": self.fc_input[rows], "token_ids": target_token_ids[rows].long(),
                "positions": positions[rows].long(), "kept": count - int(num_rejected_tokens_gpu[i]),
                "prefill": int(positions[bounds[i]]) < len(prompts[name].prompt_token_ids),
                "next": int(next_token_ids[i]),
            })

    def tensors(self, name: str, k: int) -> dict[str, torch.Tensor]:
        """One request as a plain capture."""
        columns: dict[str, list[torch.Tensor]] = defaultdict(list)
        drafted, counts = [], []
        for part in self.rows[name]:
            count, kept, step = len(part["token_ids"]), part["kept"], -1 if part["prefill"] else len(counts)
            for column in ("fc_input", "token_ids", "positions"):
                columns[column].append(part[column])
            columns["accepted"].append(torch.arange(count) < kept)
            columns["phase"].append(torch.full((count,), int(step >= 0), dtype=torch.uint8))
            columns["step"].append(torch.full((count,), step))
            # The target's choice is at hand for the rows that it accepted: the next row's token, then the bonus token.
            columns["verified_ids"].append(torch.cat([part["token_ids"][1:kept], torch.tensor([part["next"]]),
                                                      torch.full((count - kept,), -1)]))
            if step >= 0:
                counts.append(kept - 1)
                drafted.append(torch.cat([part["token_ids"][1:], torch.full((k + 1 - count,), -1)]))
        joined = {column: torch.cat(values) for column, values in columns.items()}
        if counts:
            joined |= {"draft_token_ids": torch.stack(drafted), "accepted_counts": torch.tensor(counts)}
        return joined


def prometheus(metrics: list[Any]) -> str:
    """The speculative counters as a scrape of a server would show them."""
    lines = []
    for metric in metrics:
        if metric.name.startswith("vllm:spec_decode"):
            labels = ",".join(f'{key}="{value}"' for key, value in metric.labels.items())
            lines.append(f"# TYPE {metric.name} counter")
            if hasattr(metric, "values"):
                lines += [f'{metric.name}_total{{{labels},position="{i}"}} {value}' for i, value in enumerate(metric.values)]
            else:
                lines.append(f"{metric.name}_total{{{labels}}} {metric.value}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        str(options.target), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8, disable_log_stats=False,
        distributed_executor_backend="uni", enable_prefix_caching=False, async_scheduling=False,
        speculative_config={"method": "eagle3", "model": str(options.draft), "num_speculative_tokens": options.k},
    )
    recorder = llm.collective_rpc(lambda worker: Recorder(worker.model_runner))[0]
    prompts = [{"prompt_token_ids": c.token_ids[: c.prompt_length]} for c in greedy(SERVED, options.prompts)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=options.tokens, detokenize=False))
    folder = options.out / "capture"
    folder.mkdir(parents=True, exist_ok=True)
    layer_ids = list(recorder.runner.model.model.aux_hidden_state_layers)
    about = {"engine": "vllm", "engine_version": __version__, "num_spec_tokens": options.k, "layer_ids": layer_ids,
             "temperature": 0}
    (folder / "capture.json").write_text(json.dumps(about))
    names = list(recorder.rows)
    for name in names:
        # vLLM names a request after its number, and schedules as it likes.
        i = int(name.split("-")[0])
        output = outputs[i]
        tensors = recorder.tensors(name, options.k)
        said = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
        kept = tensors["token_ids"][tensors["accepted"]].tolist()
        shared = min(len(said), len(kept))
        if kept[:shared] != said[:shared]:
            at = next(j for j in range(shared) if kept[j] != said[j])
            raise SystemExit(f"request {name}: the rows' tokens are not what vLLM answered: at row {at} (prompt of "
                             f"{len(output.prompt_token_ids)}) {kept[at : at + 6]} against {said[at : at + 6]}")
        save_file(tensors, folder / f"request-{i:03d}.safetensors")
    (options.out / "counters.txt").write_text(prometheus(llm.get_metrics()))
    print((options.out / "counters.txt").read_text())


if __name__ == "__main__":
    main()
