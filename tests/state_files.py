"""Small files of every format of states, written with nothing of the readers that the tests hold them against."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftscope.states.capture import write_trace
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Trace


def a_sample(rows: int = 6, entries: int = 4, width: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, entries, width, generator=draw).to(dtype)
    ids = torch.randint(0, 50, (rows,), generator=draw)
    return Sample("", ids, states, torch.arange(rows) >= rows // 2, tuple(f"entry {i}" for i in range(entries)))


def a_trace(prompt: int = 5, counts: tuple[int, ...] = (2, 0, 3), k: int = 3, width: int = 12, *, seed: int = 0) -> Trace:
    """A prompt and verify steps, rejected rows included."""
    draw = torch.Generator().manual_seed(seed)
    rows = prompt + len(counts) * (k + 1)
    step = torch.cat([torch.full((prompt,), -1), torch.arange(len(counts)).repeat_interleave(k + 1)])
    within = torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(k + 1).repeat(len(counts))])
    limit = torch.cat([torch.full((prompt,), k), torch.tensor(counts).repeat_interleave(k + 1)])
    ids = torch.randint(0, 50, (rows,), generator=draw)
    return Trace(
        name="", fc_input=torch.randn(rows, width, generator=draw).to(torch.bfloat16), token_ids=ids, accepted=within <= limit,
        phase=(step >= 0).to(torch.uint8), step=step, positions=torch.arange(rows), verified_ids=torch.randint(0, 50, (rows,)),
        last_hidden=torch.randn(rows, 4, generator=draw), fc_output=torch.randn(rows, 6, generator=draw),
        draft_token_ids=ids[prompt:].reshape(len(counts), k + 1)[:, 1:], accepted_counts=torch.tensor(counts),
        draft_states=torch.randn(len(counts), k, 6, generator=draw),
        meta={"engine": "vllm", "layer_ids": [2, 4, 5], "temperature": 0.5},
    )


def v1_record(sample: Sample) -> dict[str, Any]:
    return {"input_ids": sample.token_ids, "loss_mask": sample.loss_mask.long(),
            "hidden_states": [entry.contiguous() for entry in sample.states.unbind(1)]}


def v1_file(path: Path, sample: Sample, **extra: object) -> Path:
    torch.save({**v1_record(sample), **extra}, path)
    return path


def wide(sample: Sample) -> torch.Tensor:
    return sample.states[:, :-1].flatten(1).contiguous()


def last(sample: Sample) -> torch.Tensor:
    return sample.states[:, -1].contiguous()


def specforge_record(sample: Sample) -> dict[str, Any]:
    return {"input_ids": sample.token_ids, "loss_mask": sample.loss_mask.long(), "hidden_state": last(sample)[None],
            "aux_hidden_state": wide(sample)[None]}


def angelslim_record(sample: Sample) -> dict[str, Any]:
    return {"input_ids": sample.token_ids[None], "loss_mask": sample.loss_mask.long()[None], "hidden_states": wide(sample)[None],
            "target_hiddens": last(sample)[None]}


def v0_record(sample: Sample) -> dict[str, Any]:
    return {"input_ids": sample.token_ids, "loss_mask": sample.loss_mask.long(), "hidden_state": wide(sample),
            "target": last(sample)}


def modelopt_record(sample: Sample, conversation: str = "c") -> dict[str, Any]:
    return {"input_ids": sample.token_ids, "hidden_states": last(sample), "aux_hidden_states": wide(sample),
            "conversation_id": conversation, "loss_mask": sample.loss_mask.long()}


def trtllm_record(*samples: Sample) -> list[dict[str, Any]]:
    return [{"id": i, "input_ids": sample.token_ids, "hidden_state": last(sample), "aux_hidden_states": wide(sample)}
            for i, sample in enumerate(samples)]


def torchspec_record(*samples: Sample, length: int = 0) -> dict[str, Any]:
    """A dumped batch, padded on the right."""
    length = max(length, *(len(s.token_ids) for s in samples))

    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])]) for t in tensors])

    batch = {"input_ids": padded([s.token_ids for s in samples]), "loss_mask": padded([s.loss_mask.long() for s in samples]),
             "attention_mask": padded([torch.ones(len(s.token_ids)).long() for s in samples]),
             "hidden_states": padded([wide(s) for s in samples]), "last_hidden_states": padded([last(s) for s in samples]),
             "target": None}
    return {"step": 3, "batch_idx": 0, "rank": 0, "batch": batch, "plosses": [torch.tensor(1.0)], "total_loss": torch.tensor(1.0),
            "model_weights": {"fc.weight": torch.ones(2, 2)}}


def data_set(folder: Path, samples: list[Sample]) -> Path:
    """What `datasets.Dataset.save_to_disk` writes, in two files."""
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, part in enumerate((samples[:1], samples[1:])):
        table = pa.table({
            "input_ids": pa.array([s.token_ids.tolist() for s in part], pa.list_(pa.int32())),
            "loss_mask": pa.array([s.loss_mask.long().tolist() for s in part], pa.list_(pa.int64())),
            "seq_len": pa.array([len(s.token_ids) for s in part], pa.int64()),
        })
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def dump_pass(folder: Path, number: int, ids: list[int], positions: list[int], lengths: list[int], states: torch.Tensor) -> Path:
    """One pass of SGLang's tensor dump; states [R, 4, H] are boundaries 0, 1, 2 and the last state before the norm."""
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, Any] = {"model.embed_tokens": states[:, 0].clone(), "model.layers.0.input_layernorm": states[:, 0] * 0.5}
    for layer in (1, 2):
        held[f"model.layers.{layer}.input_layernorm"] = [states[:, layer] * 0.5, states[:, layer].clone()]
        held[f"model.layers.{layer}.self_attn.qkv_proj"] = torch.randn(len(ids), 24)
    held["model.norm"] = [states[:, 3] * 0.5, states[:, 3].clone()]
    held |= {"model.forward_batch_info.input_ids": torch.tensor(ids), "model.forward_batch_info.seq_lens": torch.tensor(lengths),
             "model.forward_batch_info.positions": torch.tensor(positions)}
    torch.save(held, folder / f"Pass{number:05d}.pt")
    return folder / f"Pass{number:05d}.pt"


def dumped(folder: Path, index: int, name: str, value: Any, step: int = 0, rank: int = 0, **tags: object) -> Path:
    """One file of SGLang's dumper."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"step": step, "rank": rank, "dump_index": index, "name": name, "recompute_status": "disabled", **tags}
    path = folder / ("___".join(f"{key}={value}" for key, value in meta.items()) + ".pt")
    torch.save({"value": value, "meta": {**meta, "world_size": 1, "sglang_parallel_info": {"tp_rank": rank}}}, path)
    return path


def dumper_pass(folder: Path, index: int, ids: torch.Tensor, states: torch.Tensor, rids: list[str]) -> list[Path]:
    prefix = "non_intrusive__model."
    rows = len(ids)
    held: list[tuple[str, Any]] = [
        ("input_ids", ids), ("seq_lens", torch.tensor([rows])), ("positions", torch.arange(rows)), ("rids", rids),
        (f"{prefix}embed_tokens.output", states[:, 0].clone()),
        *((f"{prefix}layers.{i}.input_layernorm.output.{k}", states[:, i] * (0.5 + 0.5 * k)) for i in (1, 2) for k in (0, 1)),
        (f"{prefix}norm.output.0", states[:, 3] * 0.5), (f"{prefix}norm.output.1", states[:, 3].clone()),
    ]
    return [dumped(folder, index + i, name, value) for i, (name, value) in enumerate(held)]


def response(sample: Sample, prompt: int, **more: object) -> dict[str, Any]:
    """SGLang's answer: rows of the prompt in one list, a row for each answer token but the last."""
    rows = wide(sample).float().tolist()
    ids = sample.token_ids.tolist()
    return {"text": 'say "hidden_states": [1]', "input_ids": ids[:prompt], "output_ids": [*ids[prompt:], 7],
            "meta_info": {"id": "x", "prompt_tokens": prompt, "hidden_states": [rows[:prompt], *rows[prompt:]]}, **more}


def _torch(record: Callable[[Sample], Any], name: str, pack: bool = False) -> Callable[[Path, Sample, int], tuple[Path, Path]]:
    def write(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
        path = folder / name.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(record(sample), path)
        if pack:
            packed = path.with_name(path.name + ".gz")
            packed.write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
            path = packed
        return path, path
    return write


def _plain(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    write_sample(folder / f"hs_{number}.safetensors", sample)
    return (folder / f"hs_{number}.safetensors",) * 2


def _capture(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    path = folder / f"req-{number}.safetensors"
    accepted = torch.ones(len(sample.token_ids)).bool()
    write_trace(path, Trace("", wide(sample), sample.token_ids, accepted, last_hidden=last(sample)))
    return path, path


def _extracted(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    path = folder / f"cmpl-{number}.safetensors"
    save_file({"hidden_states": sample.states, "token_ids": sample.token_ids}, path)
    path.with_name(path.name + ".lock").touch()
    return path, path


def _speculators(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    """The data set grows with every file; rows without one hold a token each."""
    path = folder / f"hs_{number}.safetensors"
    save_file({"hidden_states": sample.states, "token_ids": sample.token_ids}, path)
    kept = folder / ".rows.pt"
    rows = torch.load(kept) if kept.exists() else {}
    rows[number] = (sample.token_ids, sample.loss_mask)
    torch.save(rows, kept)
    empty = (torch.tensor([1]), torch.tensor([True]))
    held = [rows.get(i, empty) for i in range(max(rows) + 1)]
    data_set(folder, [Sample("", ids, sample.states, mask, ()) for ids, mask in held])
    return path, path


def _dump(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    ids = sample.token_ids.tolist()
    home = folder / f"TP0_PP0_Rank0_pid{number}"
    return home, dump_pass(home, 0, ids, list(range(len(ids))), [len(ids)], sample.states)


def _dumper(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    home = folder / f"dump_{number}"
    return home, dumper_pass(home, 1, sample.token_ids, sample.states, [f"r{number}"])[6]


def _response(folder: Path, sample: Sample, number: int) -> tuple[Path, Path]:
    path = folder / f"answer-{number}.json"
    path.write_text(json.dumps(response(sample, max(1, len(sample.token_ids) // 2))))
    return path, path


WRITERS: dict[str, Callable[[Path, Sample, int], tuple[Path, Path]]] = {
    "plain": _plain, "capture": _capture, "speculators-v1": _torch(v1_record, "data_{}.pt"), "speculators": _speculators,
    "specforge": _torch(specforge_record, "rows_0-2000/data_{}.ckpt"),
    "angelslim": _torch(angelslim_record, "rows_0-9/data_{}.ckpt"),
    "modelopt": _torch(modelopt_record, "a/conversation-{}.pt"), "torchspec": _torch(torchspec_record, "dump/g_{}_0_0.pt"),
    "trtllm": _torch(lambda sample: trtllm_record(sample), "dp_0_{}.pt"), "speculators-v0": _torch(v0_record, "data_{}.pt"),
    "vllm-extract": _extracted, "sglang-dump": _dump, "sglang-dumper": _dumper, "sglang-response": _response,
}
PACKED = {"specforge": _torch(specforge_record, "rows_0-2000/data_{}.ckpt", pack=True)}
SHARED = {"sglang-dump", "sglang-dumper"}
"""Formats whose unit is a folder of files."""
DEEP = {"specforge", "angelslim", "modelopt", "torchspec", "trtllm", "speculators-v0", *SHARED}


def write_one(name: str, folder: Path, number: int, sample: Sample | None = None) -> tuple[Path, Path]:
    """One healthy file of a format: what the source lists, and the file to spoil."""
    folder.mkdir(parents=True, exist_ok=True)
    return WRITERS[name](folder, a_sample(seed=number) if sample is None else sample, number)


def structural_points(path: Path) -> set[int]:
    """Offsets at which a file's structure changes, those around them, and a spread of others."""
    whole = path.read_bytes()
    size = len(whole)
    points = {0, 1, 7, 8, 9, size - 1, size - 4, size - 8, size // 2}
    if path.suffix == ".safetensors":
        length = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8 : 8 + length])
        points |= {8 + length // 2, 7 + length, 8 + length, 9 + length}
        points |= {8 + length + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist()[:6]:
                points |= {entry.header_offset, entry.header_offset + 30, entry.header_offset + 30 + len(entry.filename) + 1}
            points |= {archive.start_dir, archive.start_dir + 1, archive.start_dir + 46}
    elif path.suffix == ".gz":
        points |= {2, 3, 10, 11, size - 9, size - 5}
    return {point for point in points if 0 <= point < size}
