"""Drives the real EAGLE workers of a released SGLang over a toy target and a toy draft, on the CPU, with a capture attached.

    python sglang_driver.py FOLDER_OF_THE_WHEEL KIND CAPTURE [JSON]     KIND: v1 or v2

What is SGLang's own: the worker's class, its inputs and outputs and verification (`sglang.srt.speculative`), imported from the
wheel. What is made up: kernels (re-written here in plain loops), models, batches, scheduler, and every module that only those
need. Toy target: the next token is `following(token, position)`, and the state after a token says token and position. So what
each recorded row must hold follows from its token and position alone, whatever path it took.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY, WIDTH, DRAFT_WIDTH = 61, 4, 6
REAL = ("eagle_worker", "eagle_worker_v2", "eagle_worker_common", "eagle_info", "eagle_info_v2", "eagle_utils", "spec_utils",
        "spec_info", "base_spec_worker")
REAL_MODULES = {"sglang", "sglang.version", "sglang._version", "sglang.srt", "sglang.srt.speculative",
                *(f"sglang.srt.speculative.{name}" for name in REAL)}


# --- Modules that are not there -----------------------------------------------------------------------------------------


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type.__call__(Meta, name, (Anything,), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if cls.__dict__.get("_made_up", True) and len(args) == 1 and not named and isinstance(args[0], types.FunctionType):
            return args[0]  # a decorator
        return type.__call__(cls)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


class Anything(metaclass=Meta):
    def __init_subclass__(cls, **named: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else Anything()

    def __getitem__(self, item: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __gt__(self, other: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__

    def __int__(self) -> int:
        return 0

    __index__ = __int__


class Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type.__call__(Meta, name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up what is not to be real, and what is not installed."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in REAL_MODULES:
            return importlib.machinery.PathFinder.find_spec(name, [str(self.wheel / Path(*name.split(".")[:-1]))])
        if name.split(".")[0] == "sglang" or name.split(".")[0] in ("sgl_kernel", "triton", "huggingface_hub"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        return


# --- The toy world ------------------------------------------------------------------------------------------------------


def following(token: int, position: int) -> int:
    return (5 * token + 3 * position + 1) % VOCABULARY


def state_of(token: int, position: int) -> list[float]:
    """What the target's three slots hold after a token at a position: [3 * WIDTH]."""
    return [float(token), float(position), float(token * position % 97), 1.0] * 3


def draft_state(token: int, position: int) -> list[float]:
    """What the draft hands on after it was given a token with the row at a position."""
    return [float(token), float(position), 0.5, float(token + position), 0.0, 1.0]


def guesses(token: int, position: int) -> list[int]:
    """The draft's tokens, best first, for its row at `position` that was given `token`: right in three of four cases."""
    right = following(token, position + 1)
    wrong = [(right + i) % VOCABULARY for i in range(1, VOCABULARY)]
    return [wrong[0], right, *wrong[1:]] if (token + position) % 4 == 0 else [right, *wrong]


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name == "is_idle":
            return lambda: self.name == "IDLE"
        if name == "is_extend":
            return lambda *a, **b: self.name == "EXTEND"
        if name.startswith("is_"):
            return lambda *a, **b: self.name == name[3:].upper()
        raise AttributeError(name)


MODES = SimpleNamespace(**{name: Mode(name) for name in (
    "EXTEND", "DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2")})
HIDDEN = SimpleNamespace(NULL="null", LAST="last", FULL="full")


class Output(SimpleNamespace):
    """A model runner's answer in the forms that versions differ in: a pair, or an object."""

    def __iter__(self) -> Any:
        return iter((self.logits_output, False))

    def __getitem__(self, i: int) -> Any:
        return (self.logits_output, False)[i]


class Target:
    """A target worker: logits and states for the rows that it is given."""

    def __init__(self) -> None:
        model = torch.nn.Module()
        model.model = torch.nn.Module()
        model.model.layers_to_capture = [2, 5, 8]
        model.capture_aux_hidden_states = True
        backend = SimpleNamespace(get_verify_buffers_to_fill_after_draft=lambda: (None, None), max_context_len=512,
                                  verify_mask=None)
        self.model_runner = SimpleNamespace(
            model=model, attn_backend=backend, hybrid_gdn_config=None, mamba2_config=None, hybrid_lightning_config=None,
            model_is_mrope=False, device="cpu", kv_index_translator=None, watermark_state=None,
            model_config=SimpleNamespace(model_is_mrope=False))
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=WIDTH, dtype=torch.float32)
        self.device = "cpu"
        self.buffer = torch.full((512, 3 * WIDTH), -7.0)  # as a CUDA graph's: overwritten by the next verify

    def forward_batch_generation(self, batch: Any = None, *args: Any, forward_batch: Any = None, **named: Any) -> Any:
        given = forward_batch or batch or named.get("model_worker_batch")
        ids, places = given.input_ids.tolist(), given.positions.tolist()
        logits = torch.zeros(len(ids), VOCABULARY)
        for row, (token, position) in enumerate(zip(ids, places, strict=True)):
            logits[row, following(token, position)] = 1.0
        self.buffer.fill_(-7.0)
        self.buffer[: len(ids)] = torch.tensor([state_of(*pair) for pair in zip(ids, places, strict=True)])
        chosen = None
        if given.forward_mode.name == "EXTEND":
            ends = torch.tensor(given.extend_lens).cumsum(0) - 1
            chosen = logits[ends].argmax(-1).to(torch.int32)
            logits = logits[ends]
        output = SimpleNamespace(next_token_logits=logits, hidden_states=self.buffer[: len(ids)], mm_input_embeds=None)
        return SimpleNamespace(logits_output=output, next_token_ids=chosen, can_run_cuda_graph=False, kv_loc_plan=None,
                               new_seq_lens=None, next_draft_input=None, routed_experts_output=None, indexer_topk_output=None,
                               expert_distribution_metrics=None)


class DraftModel(torch.nn.Module):
    """As much of `LlamaForCausalLMEagle3` as is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=DRAFT_WIDTH)
        self.model = torch.nn.Module()
        self.model.fc = torch.nn.Linear(3 * WIDTH, DRAFT_WIDTH, bias=False)
        self.model.embed_tokens = torch.nn.Embedding(VOCABULARY, DRAFT_WIDTH)
        self.lm_head = torch.nn.Linear(DRAFT_WIDTH, VOCABULARY, bias=False)
        self.model.hidden_size_in = WIDTH
        self.hot_token_id = None


class Draft:
    """The draft's model runner. It checks what it is given: `fc` rows belong to the token before the one it is given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DraftModel()
        self.tp_group, self.attn_backend, self.canary_manager = None, Anything(), None
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle3"], eagle_config={
                "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}), model_is_mrope=False, hidden_size=DRAFT_WIDTH,
            vocab_size=VOCABULARY, dtype=torch.float32, spec_hidden_size=DRAFT_WIDTH)
        self.spec_algorithm = Algorithm()
        self.dtype = torch.float32
        self.token_to_kv_pool = None
        self.stale = 0  # rows whose token is not the one that follows: chunks' ends, rejected rows

    def forward(self, batch: Any, *args: Any, **named: Any) -> Output:
        ids, places, hidden = batch.input_ids.tolist(), batch.positions.tolist(), batch.spec_info.hidden_states
        assert len(ids) == len(places) == len(hidden), (len(ids), len(places), len(hidden))
        if hidden.shape[1] != DRAFT_WIDTH:
            self.model.model.fc(hidden)
        states = torch.tensor([draft_state(*pair) for pair in zip(ids, places, strict=True)])
        logits = torch.zeros(len(ids), VOCABULARY)
        for row, (token, position) in enumerate(zip(ids, places, strict=True)):
            for rank, guess in enumerate(guesses(token, position)[:8]):
                logits[row, guess] = 16.0 - rank
        if getattr(batch, "last_rows", None) is not None:
            states, logits = states[batch.last_rows], logits[batch.last_rows]
        return Output(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=states))


class PairTarget(Target):
    """A real target, run over each request's whole text every time: what it holds is a matter of rows and nothing else."""

    def __init__(self, model: Any, slots: list[int]) -> None:
        super().__init__()
        self.model, self.slots = model, slots
        self.texts: dict[str, list[int]] = {}

    def forward_batch_generation(self, batch: Any = None, *args: Any, forward_batch: Any = None, **named: Any) -> Any:
        given = forward_batch or batch or named.get("model_worker_batch")
        prefill, ids, places, at = given.forward_mode.name == "EXTEND", given.input_ids.tolist(), given.positions.tolist(), 0
        hidden, logits = [], []
        for i, request in enumerate(given.reqs):
            n = given.extend_lens[i] if prefill else len(ids) // len(given.reqs)
            text = self.texts.setdefault(request.rid, [])
            text[places[at] :] = ids[at : at + n]
            with torch.inference_mode():
                out = self.model(torch.tensor([text]), output_hidden_states=True)
            hidden.append(torch.cat([out.hidden_states[b][0, -n:] for b in self.slots], -1))
            logits.append(out.logits[0, -1:] if prefill else out.logits[0, -n:])
            at += n
        scores = torch.cat(logits)
        output = SimpleNamespace(next_token_logits=scores, hidden_states=torch.cat(hidden), mm_input_embeds=None)
        return SimpleNamespace(
            logits_output=output, next_token_ids=scores.argmax(-1).to(torch.int32) if prefill else None,
            can_run_cuda_graph=False, kv_loc_plan=None, new_seq_lens=None, routed_experts_output=None, indexer_topk_output=None)


class PairDraft(Draft):
    """A real draft. Its cache is the rows it was given: fused states and tokens, each with the position it was given."""

    def __init__(self, draft: Any) -> None:
        super().__init__()
        self.draft = draft
        self.model.model.fc = draft.fc
        self.model.config.hidden_size = draft.config.hidden_size
        self.model.hot_token_id = draft.target_ids
        self.rows: dict[str, list[tuple[torch.Tensor, int, int]]] = {}
        self.steps: dict[str, list[tuple[torch.Tensor, int, int]]] = {}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, batch: Any, *args: Any, **named: Any) -> Output:
        mode = batch.forward_mode.name
        ids, places, hidden, at = batch.input_ids.tolist(), batch.positions.tolist(), batch.spec_info.hidden_states, 0
        requests = [r for r in batch.reqs if mode != "DRAFT_EXTEND" or not r.finished()]
        extend = mode != "DECODE"
        states, logits = [], []
        with torch.inference_mode():
            inputs = self.model.model.fc(hidden) if extend else hidden
        for i, request in enumerate(requests):
            n = _list(batch.extend_lens)[i] if extend else 1
            with torch.inference_mode():
                new = [(inputs[at + j], ids[at + j], places[at + j]) for j in range(n)]
                kept = self.rows.setdefault(request.rid, [])
                if extend:
                    kept[places[at] :] = new
                    self.steps[request.rid] = []
                    rows = kept
                else:
                    del kept[int(batch.seq_lens[i]) :]
                    self.steps[request.rid] += new
                    rows = kept + self.steps[request.rid]
                output = self.draft(torch.stack([row[0] for row in rows])[None],
                                    self.draft.embed(torch.tensor([row[1] for row in rows]))[None],
                                    torch.tensor([[row[2] for row in rows]]), self.attend)[0, -n:]
                states.append(self.draft.feedback(output))
                logits.append(self.draft.logits(output))
            at += n
        answers, scores = torch.cat(states), torch.cat(logits)
        if getattr(batch, "last_rows", None) is not None:
            answers, scores = answers[batch.last_rows], scores[batch.last_rows]
        return Output(logits_output=SimpleNamespace(next_token_logits=scores, hidden_states=answers))


def pair(plan: dict[str, Any]) -> tuple[Any, Any]:
    """The toy's, or a real one from the folders that the plan names."""
    if "target" not in plan:
        return Target(), Draft()
    from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
    from draftscope.target.model import load_target
    from draftscope.target.parts import read_parts

    parts = read_parts(Path(plan["target"]))
    draft = build_draft(load_checkpoint(plan["draft"], target_layers=parts.layers), parts)
    return PairTarget(load_target(Path(plan["target"])).model, plan["slots"]), PairDraft(draft)


class Algorithm:
    name = "EAGLE3"

    def is_eagle3(self) -> bool:
        return True

    def is_standalone(self) -> bool:
        return False


class Request:
    def __init__(self, name: str, prompt: list[int], answer: int, *, cached: int = 0, stop: int | None = None) -> None:
        self.rid, self.origin_input_ids, self.output_ids, self.cached = name, prompt, [], cached
        self.sampling_params = SimpleNamespace(
            stop_token_ids=None if stop is None else {stop}, ignore_eos=False, max_new_tokens=answer, min_new_tokens=0,
            temperature=1.0, top_k=1)
        self.eos_token_ids, self.tokenizer, self.grammar = None, None, None
        self.finished_reason: str | None = None
        self.spec_verify_ct = self.spec_accepted_tokens = self.spec_num_correct_drafts = self.decode_batch_idx = 0
        self.spec_accepted_drafts = self.kv_committed_len = self.kv_allocated_len = self.reasoning_tokens = 0
        self.require_reasoning, self.mamba_ping_pong_track_buffer = False, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("spec_", "update_spec", "time_stats")):
            return Anything() if name == "time_stats" else (lambda *a, **b: None)
        raise AttributeError(name)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def check_finished(self, *args: Any, **named: Any) -> None:
        stops = self.sampling_params.stop_token_ids or ()
        if len(self.output_ids) >= self.sampling_params.max_new_tokens or self.output_ids[-1] in stops:
            self.finished_reason = "length or stop"

    update_finish_state = check_finished


class Batch(SimpleNamespace):
    """A schedule batch (and worker batch) with the fields that are read."""

    def __init__(self, requests: list[Request], **named: Any) -> None:
        bs = len(requests)
        everything = {
            "reqs": requests, "is_extend_in_batch": False, "spec_info": None, "has_grammar": False, "return_logprob": False,
            "return_hidden_states": False, "device": "cpu", "tree_cache": None, "req_to_token_pool": Anything(),
            "req_pool_indices": torch.arange(bs), "out_cache_loc": torch.arange(4096), "mamba_track_indices": None,
            "token_to_kv_pool_allocator": SimpleNamespace(free=lambda *a: None, page_size=1),
            "model_config": SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCABULARY, dtype=torch.float32, think_end_id=None),
            "chunked_req_next_prompt_token": None, "chunked_req": None, "sampling_info": Sampling(bs),
            "multimodal_inputs": [None] * bs,
            "capture_hidden_mode": None, "global_num_tokens": None, "input_ids": None, "enable_overlap": True,
            "decoding_reqs": None, "hisparse_coordinator": None, "spec_algorithm": Algorithm(),
            "dp_spec_prefill_coordination_metadata": None,
        }
        super().__init__(**(everything | named))
        self.seq_lens_sum = int(self.seq_lens.sum())

    def batch_size(self) -> int:
        return len(self.reqs)

    def get_model_worker_batch(self, *args: Any, **named: Any) -> Batch:
        mode = getattr(self.spec_info, "capture_hidden_mode", None)
        return self.copy_with(capture_hidden_mode=mode)

    def copy_with(self, **named: Any) -> Batch:
        fresh = Batch.__new__(Batch)
        fresh.__dict__.update(self.__dict__)
        fresh.__dict__.update(named)
        fresh.extend_seq_lens, fresh.extend_prefix_lens = getattr(self, "extend_lens", None), getattr(self, "prefix_lens", None)
        return fresh

    @property
    def positions(self) -> torch.Tensor:
        """As `ForwardBatch` makes them."""
        own = getattr(self.spec_info, "positions", None)
        if self.forward_mode.name == "EXTEND" or own is None:
            spans = zip(_list(self.prefix_lens), _list(self.extend_lens), strict=True)
            return torch.cat([torch.arange(start, start + n) for start, n in spans])
        return own

    def maybe_evict_swa(self) -> None:
        return


def _list(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


class Sampling:
    def __init__(self, bs: int) -> None:
        self.bs = bs
        self.is_all_greedy, self.has_custom_logit_processor, self.logit_bias, self.vocab_mask = True, False, None, None
        self.penalizer_orchestrator = SimpleNamespace(is_required=False)
        self.acc_linear_penalties = self.acc_additive_penalties = self.acc_scaling_penalties = None
        self.temperatures, self.sampling_seed = torch.ones(bs, 1), None
        self.grammars = self.vocab_size = None

    def __getattr__(self, name: str) -> Any:
        return None

    def __len__(self) -> int:
        return self.bs


def forward_batch(batch: Any, runner: Any, *args: Any, **named: Any) -> Any:
    """In place of `ForwardBatch.init_new`: the rows, and which of them the runner answers for."""
    last = None
    if isinstance(runner, Draft) and batch.forward_mode.name in ("EXTEND", "DRAFT_EXTEND"):
        last = torch.tensor(_list(batch.extend_lens)).cumsum(0) - 1  # CaptureHiddenMode.LAST
    return SimpleNamespace(
        input_ids=batch.input_ids, positions=batch.positions.clone(), spec_info=batch.spec_info, forward_mode=batch.forward_mode,
        batch_size=len(batch.reqs), out_cache_loc=torch.zeros(4096, dtype=torch.long) if batch.out_cache_loc is None
        else batch.out_cache_loc, seq_lens=batch.seq_lens, seq_lens_cpu=batch.seq_lens_cpu, seq_lens_sum=batch.seq_lens_sum,
        extend_lens=getattr(batch, "extend_lens", None), last_rows=last, sampling_info=batch.sampling_info,
        mark_forward_metadata_ready=lambda: None, extend_seq_lens=getattr(batch, "extend_lens", None), num_token_non_padded=None,
        mm_input_embeds=None, reqs=batch.reqs)


# --- Kernels, in plain loops --------------------------------------------------------------------------------------------


def build_tree(parent_list: Any, selected: Any, seq_lens: Any, mask: Any, positions: Any, index: Any, child: Any, sibling: Any,
               topk: int, depth: int, nodes: int, *rest: Any) -> None:
    for b in range(len(seq_lens)):
        chosen, depths = selected[b].tolist(), [0] * nodes
        index[b] = torch.arange(b * nodes, (b + 1) * nodes)
        above = [0] * nodes
        for node in range(1, nodes):
            place = chosen[node - 1] // topk
            above[node] = 0 if place == 0 else chosen.index(int(parent_list[b][place])) + 1
            depths[node] = depths[above[node]] + 1
        for node in reversed(range(1, nodes)):
            sibling[b][node] = child[b][above[node]]
            child[b][above[node]] = node
        positions[b * nodes : (b + 1) * nodes] = seq_lens[b] + torch.tensor(depths)


def verify_greedy(predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, target_predict: Any, *rest: Any,
                  **links: Any) -> Any:
    child = links.get("retrive_next_token", links.get("retrieve_next_token"))
    sibling = links.get("retrive_next_sibling", links.get("retrieve_next_sibling"))
    nodes = candidates.shape[1]
    for b in range(len(candidates)):
        node, path = 0, [0]
        while True:
            wanted, below = int(target_predict[b, node]), int(child[b, node])
            predicts[b * nodes + node] = wanted
            while below >= 0 and int(candidates[b, below]) != wanted:
                below = int(sibling[b, below])
            if below < 0 or len(path) == accept_index.shape[1]:
                break
            path.append(node := below)
        accept_token_num[b] = len(path) - 1
        accept_index[b, : len(path)] = torch.tensor(path) + b * nodes
    return predicts, accept_index, accept_token_num


class Kernel:
    """Called as Triton's are: `kernel[grid](...)`."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        return self.function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


def extend_after_decode(ids: Any, seq_lens: Any, lens: Any, positions: Any, last: Any, upper: int) -> None:
    start = 0
    for b, n in enumerate(lens.tolist()):
        positions[start : start + n] = int(seq_lens[b]) - n + torch.arange(n)
        last[b] = ids[start + n - 1]
        start += n


def fill_last(tokens: Any, lens: Any, last: Any, stride: int, *rest: Any) -> None:
    for b, n in enumerate(lens.tolist()):
        last[b] = tokens.flatten()[b * stride + n - 1]


def commit_outputs(predict: Any, accept_index: Any, accept_lens: Any, seq_lens: Any) -> Any:
    last = torch.stack([predict[accept_index[b, n - 1]] for b, n in enumerate(accept_lens.tolist())])
    return seq_lens + accept_lens, last.to(torch.int32)


def put(module: Any, **named: Any) -> None:
    """Set names in a module that has them, or may get them from a kernel package that is not there."""
    for name, value in named.items():
        setattr(module, name, value)


# --- A run --------------------------------------------------------------------------------------------------------------


def run(wheel: Path, kind: str, plan: dict[str, Any]) -> dict[str, Any]:
    plan["pair"] = pair(plan)  # before `sglang` and its like are made up
    sys.meta_path.insert(1, Stubs(wheel))  # behind the capture's own finder
    arange = torch.arange
    torch.arange = lambda *a, **b: arange(*a, **(b | {"device": "cpu"}))  # type: ignore[assignment]  # 0.5.5 says "cuda"
    torch.compile = lambda *a, **b: a[0] if a else (lambda function: function)  # type: ignore[assignment]
    information = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    put(information, ForwardMode=MODES, CaptureHiddenMode=HIDDEN, ForwardBatch=SimpleNamespace(init_new=forward_batch))
    put(importlib.import_module("sglang.srt.managers.tp_worker"), TpModelWorker=type("TpModelWorker", (), {}))
    put(importlib.import_module("sglang.srt.managers.utils"), GenerationBatchResult=SimpleNamespace)
    put(importlib.import_module("sglang.srt.managers.scheduler"), GenerationBatchResult=SimpleNamespace)
    common = importlib.import_module("sglang.srt.utils.common")
    utilities = importlib.import_module("sglang.srt.utils")
    for module in (common, utilities):
        put(module, fast_topk=lambda values, k, dim=-1: torch.topk(values, k, dim=dim), next_power_of_2=lambda n: n,
            **{name: lambda *a: False for name in ("is_cuda", "is_hip", "is_npu", "is_musa", "is_xpu", "is_cpu")},
            empty_context=contextlib.nullcontext)
    put(importlib.import_module("sglang.kernels.ops.sampling"), softmax=lambda logits, **named: logits.softmax(-1))
    torch.get_device_module = lambda device=None: SimpleNamespace(  # type: ignore[assignment]
        current_stream=lambda *a: Anything(), Event=Anything, Stream=Anything)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment,method-assign]
    world = importlib.import_module("sglang.srt.runtime_context")
    spec = SimpleNamespace(speculative_use_rejection_sampling=False, speculative_eagle_topk=plan["topk"],
                           speculative_num_steps=plan["steps"], speculative_num_draft_tokens=plan["nodes"])
    put(world, get_exec=lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=None)),
        get_schedule=lambda: SimpleNamespace(max_running_requests=16, page_size=1))
    put(world, get_spec=lambda: spec, get_parallel=lambda: SimpleNamespace(pp_size=1, dp_rank=None))
    return (run_v1 if kind == "v1" else run_v2)(plan)


def arguments(plan: dict[str, Any]) -> Any:
    return SimpleNamespace(
        tp_size=1, dp_size=1, enable_dp_attention=False, enable_nan_detection=False, speculative_algorithm="EAGLE3",
        speculative_num_draft_tokens=plan["nodes"], speculative_num_steps=plan["steps"], speculative_eagle_topk=plan["topk"],
        speculative_use_rejection_sampling=False, model_path="toy target", speculative_draft_model_path="toy draft",
        disable_cuda_graph=True, device="cpu", cuda_graph_max_bs=16, cuda_graph_max_bs_decode=16, max_running_requests=16,
        cuda_graph_config=None)


def equip(worker: Any, plan: dict[str, Any], target: Target, draft: Draft) -> None:
    worker.__dict__.update(
        server_args=arguments(plan), topk=plan["topk"], speculative_num_steps=plan["steps"], tp_rank=0, device="cpu",
        speculative_num_draft_tokens=plan["nodes"], speculative_algorithm=Algorithm(), enable_nan_detection=False, page_size=1,
        hot_token_id=draft.model.hot_token_id,
        cuda_graph_runner=None, cuda_graph_runner_for_draft_extend=None, eagle_use_aux_hidden_state=True,
        draft_attn_backend=SimpleNamespace(attn_backends=[Anything()] * 8, init_forward_metadata=lambda batch: None),
        token_to_kv_pool_allocator=SimpleNamespace(free=lambda *a: None, page_size=1, get_kvcache=lambda: None),
        adaptive_controller=None, draft_extend_attn_backend=None,
        req_to_token_pool=Anything(), plan_stream=None, plan_stream_ctx=contextlib.nullcontext(),
        model_config=target.model_config,
        draft_tp_context=lambda *a: contextlib.nullcontext(), index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False, parallel_layout=SimpleNamespace(local_dp=True, tp_group=None),
        enable_dp_spec_prefill_coordination=False, _hosts_draft=True,
    )


def kernels() -> None:
    """Plain loops in place of kernels, wherever a module of this version names one."""
    modules = [module for name, module in sys.modules.items() if name in REAL_MODULES]
    loops = {
        "sgl_build_tree_kernel_efficient": build_tree, "build_tree_kernel_efficient_func": build_tree,
        "create_extend_after_decode_spec_info": Kernel(extend_after_decode),
        "fill_new_verified_id": Kernel(fill_last), "fill_bonus_tokens": Kernel(fill_last), "fill_bonus_tokens_func": fill_last,
        "prepare_verify_commit_outputs": commit_outputs,
        "assign_req_to_token_pool_func": lambda *a, **b: None, "move_accept_tokens_to_target_kvcache": lambda *a, **b: None,
        "commit_mamba_states_after_verify": lambda *a, **b: None, "record_stream_for_v2_verify": lambda *a, **b: None,
        "record_stream_each": lambda *a, **b: None,
    }
    for module in modules:
        for name, loop in loops.items():
            if name in vars(module) or (name.startswith("sgl_build") and module.__name__.endswith("eagle_utils")):
                setattr(module, name, loop)
        if "verify_tree_greedy_func" in vars(module):
            module.verify_tree_greedy_func = verify_greedy


def requests_of(plan: dict[str, Any]) -> list[Request]:
    return [Request(one["rid"], one["prompt"], one["answer"], cached=one.get("cached", 0), stop=one.get("stop"))
            for one in plan["requests"]]


def prefill_batches(requests: list[Request], chunk: int) -> Any:
    """Chunks of all requests together, as long as there are any; yields the batch and which of them this ends."""
    done = {request.rid: request.cached for request in requests}
    whole = {request.rid: request.origin_input_ids + request.output_ids for request in requests}
    while going := [request for request in requests if done[request.rid] < len(whole[request.rid])]:
        texts = [whole[request.rid] for request in going]
        starts = [done[request.rid] for request in going]
        ends = [min(start + chunk, len(text)) for start, text in zip(starts, texts, strict=True)]
        lens = torch.tensor(ends)
        yield Batch(
            going, forward_mode=MODES.EXTEND, seq_lens=lens.clone(), seq_lens_cpu=lens.clone(), prefix_lens=starts,
            extend_lens=[end - start for start, end in zip(starts, ends, strict=True)],
            extend_seq_lens=[end - start for start, end in zip(starts, ends, strict=True)], extend_prefix_lens=starts,
            input_ids=torch.tensor([token for text, start, end in zip(texts, starts, ends, strict=True)
                                    for token in text[start:end]]),
        ), [end == len(text) for end, text in zip(ends, texts, strict=True)]
        for request, end in zip(going, ends, strict=True):
            done[request.rid] = end


def run_v1(plan: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module("sglang.srt.speculative.eagle_worker")
    kernels()
    kind = module.EAGLEWorker
    target, draft = plan["pair"]
    worker = kind.__new__(kind)
    equip(worker, plan, target, draft)
    worker.target_worker, worker.model_runner = target, draft

    def preprocess(self: Any, batch: Any) -> None:
        batch.spec_info.positions = batch.seq_lens.repeat_interleave(self.topk)
        batch.out_cache_loc = torch.zeros(len(batch.reqs) * self.topk * self.speculative_num_steps, dtype=torch.long)

    def prepare(self: Any, batch: Any, page_size: int) -> None:
        batch.input_ids, batch.out_cache_loc = self.draft_token, torch.arange(len(self.draft_token))

    kind._draft_preprocess_decode = preprocess
    information = importlib.import_module("sglang.srt.speculative.eagle_info")
    information.EagleVerifyInput.prepare_for_verify = prepare
    requests = requests_of(plan)
    for batch, ended in prefill_batches(requests, plan["chunk"]):
        result = worker.forward_batch_generation(batch)
        for request, last, token in zip(list(batch.reqs), ended, result.next_token_ids.tolist(), strict=True):
            if last:
                request.output_ids.append(token)
        carried = batch
    if len(carried.reqs) < len(requests):
        raise SystemExit("plan: all prompts must end in one chunk")
    batch = Batch(requests, forward_mode=MODES.DECODE, seq_lens=carried.seq_lens.clone(),
                  seq_lens_cpu=carried.seq_lens_cpu.clone(), spec_info=carried.spec_info)
    while batch.reqs:
        worker.forward_batch_generation(batch)
        keep = [i for i, request in enumerate(batch.reqs) if not request.finished()]
        info = batch.spec_info
        batch = Batch([batch.reqs[i] for i in keep], forward_mode=MODES.DECODE, seq_lens=batch.seq_lens[keep].clone(),
                      seq_lens_cpu=batch.seq_lens_cpu[keep].clone(), spec_info=info)
        assert not keep or len(info.hidden_states) == len(keep)
    return told(requests, draft)


def run_v2(plan: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module("sglang.srt.speculative.eagle_worker_v2")
    kernels()
    target, draft = plan["pair"]
    outer, inner = module.EAGLEWorkerV2.__new__(module.EAGLEWorkerV2), module.EagleDraftWorker.__new__(module.EagleDraftWorker)
    for worker in (outer, inner):
        equip(worker, plan, target, draft)
    inner.target_worker, inner.draft_runner, outer._target_worker, outer._draft_worker = target, draft, target, inner
    prepare_v2(module, plan, inner)
    inner.tree_mask_mode = importlib.import_module("sglang.srt.speculative.eagle_utils").TreeMaskMode.FULL_MASK
    if hasattr(inner, "_rebuild_topk1_chain_buffers"):
        inner._rebuild_topk1_chain_buffers()
    requests = requests_of(plan)
    for batch, ended in prefill_batches(requests, plan["chunk"]):
        result = outer.forward_batch_generation(batch)
        for request, last, token in zip(batch.reqs, ended, result.next_token_ids.tolist(), strict=True):
            if last:
                request.output_ids.append(token)
        carried, drafts, lens = batch, result.next_draft_input, torch.tensor([len(r.origin_input_ids) for r in batch.reqs])
    if len(carried.reqs) < len(requests):
        raise SystemExit("plan: all prompts must end in one chunk")
    going, waiting = requests, None
    while going:
        batch = Batch(list(going), forward_mode=MODES.DECODE, seq_lens=lens.clone(), seq_lens_cpu=lens.clone(), spec_info=drafts)
        result = outer.forward_batch_generation(batch)
        lens, drafts = lens + result.accept_lens, result.next_draft_input
        # As the scheduler that overlaps: what a pass brought is looked at when the next is under way.
        passed, waiting = waiting, (list(going), result.next_token_ids.clone().view(len(going), -1), result.accept_lens.tolist())
        for request, tokens, n in zip(*passed, strict=True) if passed else ():
            for token in tokens[:n].tolist():
                if not request.finished():
                    request.output_ids.append(token)
                    request.check_finished()
        keep = [i for i, request in enumerate(going) if not request.finished()]
        going, lens = [going[i] for i in keep], lens[keep]
        waiting = ([waiting[0][i] for i in keep], waiting[1][keep], [waiting[2][i] for i in keep])
        for name in ("topk_p", "topk_index", "hidden_states", "verified_id", "bonus_tokens", "new_seq_lens"):
            if isinstance(getattr(drafts, name, None), torch.Tensor):
                setattr(drafts, name, getattr(drafts, name)[keep])
    return told(requests, draft)


def told(requests: list[Request], draft: Draft) -> dict[str, Any]:
    return {"texts": {request.rid: request.origin_input_ids + request.output_ids for request in requests},
            "fc": draft.model.model.fc.weight.tolist()}


def prepare_v2(module: Any, plan: dict[str, Any], inner: Any) -> None:
    """Cache bookkeeping, which differs by version and is not what is tested."""
    topk = plan["topk"]

    def for_draft(info: Any, pool: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        info.positions = batch.seq_lens.repeat_interleave(topk)
        batch.out_cache_loc = torch.zeros(len(batch.reqs) * topk * plan["steps"], dtype=torch.long)
        made = forward_batch(batch, inner.draft_runner)
        return (made, False, None) if inner.three else (made, False)

    def for_verify(info: Any, pool: Any, batch: Any, worker: Any, *rest: Any, **named: Any) -> Any:
        batch.input_ids = info.draft_token
        batch.forward_mode = MODES.TARGET_VERIFY
        made = forward_batch(batch, worker)
        made.positions = info.positions
        return made, False

    def for_extend(info: Any, batch: Any, predict: Any, count: int, runner: Any, *rest: Any, **named: Any) -> Any:
        before = batch.seq_lens
        batch.spec_info, batch.input_ids = info, predict
        if not inner.schedule_batches:
            batch.seq_lens = batch.seq_lens + count
        batch.prefix_lens, batch.extend_lens = before.tolist(), [count] * len(batch.reqs)
        batch.forward_mode = MODES.DRAFT_EXTEND_V2
        info.positions = None
        return forward_batch(batch, runner)

    names = vars(module)
    inner.three = "eagle_worker_common" in " ".join(sys.modules) and "prepare_for_draft" in names
    inner.schedule_batches = "eagle_prepare_for_verify" in names or inner.three
    information = importlib.import_module("sglang.srt.speculative.eagle_info")
    for kind, method, value in (("EagleDraftInput", "prepare_for_v2_draft", for_draft),
                                ("EagleVerifyInput", "prepare_for_v2_verify", for_verify),
                                ("EagleDraftInput", "prepare_for_extend_to_fill_draft_kvcache", for_extend)):
        setattr(getattr(information, kind), method, value)
    for name, value in (("prepare_for_draft", for_draft), ("prepare_for_draft_extend", for_extend),
                        ("eagle_prepare_for_verify", for_verify)):
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "") in REAL_MODULES and name in vars(other):
                setattr(other, name, value)
        if name != "eagle_prepare_for_verify" and name in dir(type(inner)):
            setattr(inner, name, value)


if __name__ == "__main__":
    wheel, kind, capture = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path.insert(0, str(wheel))
    os.environ["DRAFTSCOPE_CAPTURE"] = capture
    from draftscope.engines import inside

    inside.register_sglang()
    plan = json.loads(sys.argv[4])
    print(json.dumps(run(wheel, kind, plan)))
