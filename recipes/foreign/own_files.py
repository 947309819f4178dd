"""Files read and written by speculators' and SpecForge's own code, for comparison.

    python recipes/foreign/own_files.py JOBS.json

JOBS is a list of [job, source, out], in order; each job is a function below, which says what it takes and gives. Needs the
environment of scripts/env-speculators.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SAMPLE = ("input_ids", "loss_mask", "hidden_states", "last")


def flat(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{i}.{name}": tensor.contiguous().clone() for i, sample in enumerate(samples) for name, tensor in sample.items()}


def nested(path: Path) -> list[dict[str, Tensor]]:
    """A list of samples from `i.NAME`."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        number, _, name = key.partition(".")
        found.setdefault(int(number), {})[name] = tensor
    return [found[i] for i in sorted(found)]


# speculators 0.9.0


def speculators_reads_data(source: Path, out: Path) -> None:
    """A data set, through the trainer's data set class, to `i.NAME` of SAMPLE."""
    from speculators.train.data import ArrowDataset

    data = ArrowDataset(10**6, source, on_missing="raise", hidden_states_dtype=torch.float32)
    samples = [data[i] for i in range(len(data))]
    save_file(flat([{"input_ids": s["input_ids"], "loss_mask": s["loss_mask"], "hidden_states": s["hidden_states"],
                     "last": s["verifier_last_hidden_states"]} for s in samples]), out)


def speculators_reads_states(source: Path, out: Path) -> None:
    """A folder of hs_{i}.safetensors through the transfer that the data set class reads it by, eight-bit ones made wide."""
    from hs_connectors.transfer import FP8Transfer

    transfer = FP8Transfer(source)
    numbers = sorted(int(path.stem[3:]) for path in source.glob("hs_*.safetensors"))
    held = [transfer.get_cached(number) for number in numbers]
    save_file({f"{number}.{name}": one[name].contiguous() for number, one in zip(numbers, held, strict=True)
               for name in ("hidden_states", "token_ids")}, out)


@contextmanager
def engine(samples: list[dict[str, Tensor]], folder: Path) -> Iterator[str]:
    """What speculators asks of a vLLM server, answered with the states of samples; they lie ready in `folder`."""
    folder.mkdir(parents=True)
    ready: dict[tuple[int, ...], Path] = {}
    for i, sample in enumerate(samples):
        ready[tuple(sample["input_ids"].tolist())] = path = folder / f"cmpl-{i}.safetensors"
        save_file({"hidden_states": sample["states"], "token_ids": sample["input_ids"]}, path)

    class Answers(BaseHTTPRequestHandler):
        def answer(self, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"object": "list", "data": [{"id": "target", "object": "model", "created": 0, "owned_by": "here"}]})

        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "prompt_token_ids": ids}
            self.answer({"id": "x", "object": "text_completion", "created": 0, "model": "target", "choices": [choice],
                         "kv_transfer_params": {"hidden_states_path": str(ready[tuple(ids)])}})

        def log_message(self, *about: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def speculators_writes_data(source: Path, out: Path) -> None:
    """A data set by its two commands, from `i.input_ids`, `i.loss_mask` and `i.states` [T, L, H]; the target's tokenizer lies
    beside the source."""
    from speculators.cli.generate_offline_data import generate_offline_data
    from speculators.cli.prepare_data import prepare_data

    samples = nested(source)
    rows = out.with_name(f"{out.name}.jsonl")
    rows.write_text("".join(json.dumps({name: sample[name].tolist() for name in ("input_ids", "loss_mask")}) + "\n"
                            for sample in samples))
    prepare_data(str(source.parent / "tokenizer"), [str(rows)], str(out), seq_length=10**4, max_samples=None,
                 token_freq_path=None, render_endpoint=None, seed=0, num_preprocessing_workers=1, minimum_valid_tokens=None,
                 overwrite=False, allow_empty_output=False, trust_remote_code=False, skip_token_freq=True)
    with engine(samples, out.with_name(f"{out.name}.engine")) as endpoint:
        generate_offline_data(
            model=None, endpoint=endpoint, preprocessed_data=str(out), max_samples=None, output=None, concurrency=2,
            validate_outputs=True, request_timeout=60.0, max_retries=0, fail_on_error=False, max_consecutive_errors=1,
            world_size=1, rank=0,
        )


def speculators_writes_eight_bits(source: Path, out: Path) -> None:
    """hs_{i}.safetensors as its eight-bit connector writes them, from `i.input_ids` and `i.states`."""
    from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8

    out.mkdir()
    for i, sample in enumerate(nested(source)):
        states, scales = quantize_tensor_to_fp8(sample["states"])
        save_file({"hidden_states": states, SCALES_KEY: scales, "token_ids": sample["input_ids"]}, out / f"hs_{i}.safetensors")


def speculators_reads_draft(source: Path, out: Path) -> None:
    """Every tensor of a draft, by speculators' names, in the files' precision."""
    from speculators.model import SpeculatorModel

    model = SpeculatorModel.from_pretrained(str(source), dtype="auto")
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not name.startswith("verifier_")}
    save_file(held, out)


def speculators_writes_draft(source: Path, out: Path) -> None:
    """A draft that it read, saved by it."""
    from speculators.model import SpeculatorModel

    SpeculatorModel.from_pretrained(str(source), dtype="auto").save_pretrained(out)


def speculators_converts_draft(source: Path, out: Path) -> None:
    """A native draft in its own form, by its converter; the target is the `target` beside the draft's folder."""
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    config = json.loads((source / "config.json").read_text())
    Eagle3Converter().convert(source, out, str(source.parent / "target"), validate=False,
                              norm_before_residual=config.get("norm_before_residual", False))


# SpecForge 0.2.0


def specforge_reads_data(source: Path, out: Path) -> None:
    """A folder of offline features, through reader, store and normalisation of the trainer, to `i.NAME` of SAMPLE."""
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    store, samples = LocalFeatureStore(), []
    for reference in OfflineManifestReader(str(source), validate_files=True):
        raw, _ = store.get(reference)
        made = normalize_offline_sample(raw, max_len=10**6)
        samples.append({"input_ids": made["input_ids"][0], "loss_mask": made["loss_mask"][0],
                        "hidden_states": made["hidden_state"][0], "last": made["target"][0]})
    save_file(flat(samples), out)


def specforge_writes_data(source: Path, out: Path) -> None:
    """What its feature store puts on disk while it trains, from `i.input_ids`, `i.loss_mask` and `i.states` (names in memory)."""
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    out.mkdir()
    store = LocalFeatureStore(dump_dir=str(out))
    for i, sample in enumerate(nested(source)):
        states = sample["states"]
        store.put({"input_ids": sample["input_ids"][None], "loss_mask": sample["loss_mask"].long()[None],
                   "attention_mask": torch.ones_like(sample["input_ids"])[None],
                   "hidden_state": states[:, :-1].flatten(1)[None], "target": states[:, -1][None]},
                  sample_id=f"sample-{i}", metadata={"strategy": "eagle3"})


def specforge_reads_draft(source: Path, out: Path) -> None:
    """Every tensor of a draft, in the files' precision."""
    from specforge.modeling.auto import AutoDraftModel

    held = AutoDraftModel.from_pretrained(str(source), dtype="auto").state_dict()
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, out)


def specforge_writes_draft(source: Path, out: Path) -> None:
    """A draft's tensors saved as a run's checkpoint, and that exported to a folder, by its own commands."""
    from specforge.export.to_hf import export_to_hf
    from specforge.training.checkpoint import CheckpointManager

    held = load_file(source / "model.safetensors")
    run = out.with_name(f"{out.name}.run")
    CheckpointManager(str(run), run_id="run").save({"draft_state_dict": held}, 7)
    export_to_hf(str(run), str(source / "config.json"), str(out))


def main() -> None:
    torch._dynamo.config.disable = True  # SpecForge's norm is compiled, which needs a compiler
    for job, source, out in json.loads(Path(sys.argv[1]).read_text()):
        globals()[job](Path(source), Path(out))


if __name__ == "__main__":
    main()
