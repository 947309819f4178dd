"""Small files in the formats of other stacks, laid out as the pages of docs/with name them: the tiny pair, a layer off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from engine_reports import Simulated, sglang_answer, sglang_args, sglang_line, vllm_line, vllm_scrape, windows
from safetensors.torch import load_file
from state_files import WRITERS
from tiny import TARGET, tiny_rig

from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.pipeline.convert_data import convert_data
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.states.opening import open_source
from draftscope.states.types import Sample

PLANTED = "layer-offset"
BOUNDARIES = (2, 4, 5)


def run_case(folder: Path) -> Path:
    """Training states, a capture one boundary off, draft and counters, in the project's own forms."""
    known = fault(PLANTED)
    tiny_rig(12, 48).run(known.make(Plant.healthy(BOUNDARIES), known.variants[0]), folder)
    return folder


def lay_out(name: str, run: Path, work: Path) -> None:
    """The files of one page, in the working folder that its commands are run in."""
    work.mkdir()
    (work / "target").symlink_to(TARGET, target_is_directory=True)
    (work / "capture").symlink_to(run / "capture", target_is_directory=True)
    LAYOUTS[name](run, work)


def _own(run: Path, work: Path) -> None:
    (work / "states").symlink_to(run / "train", target_is_directory=True)
    shutil.copytree(run / "draft", work / "draft")
    (work / "metrics.txt").write_text(vllm_scrape(counted(run)))


def _specforge(run: Path, work: Path) -> None:
    _torch_files("specforge", run, work / "hidden_states")
    shutil.copytree(run / "draft", work / "draft")
    _sglang_log(run, work)


def _speculators(run: Path, work: Path) -> None:
    convert_data(run / "train", work / "hidden_states", "speculators")
    convert_draft(run / "draft", "speculators", work / "draft", target=TARGET)
    (work / "metrics.txt").write_text(vllm_scrape(counted(run)))


def _modelopt(run: Path, work: Path) -> None:
    """Nested ids that mean the output of a layer, as its export has them."""
    _torch_files("modelopt", run, work / "hidden_states")
    shutil.copytree(run / "draft", work / "draft")
    config = json.loads((work / "draft" / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [b - 1 for b in BOUNDARIES], "use_aux_hidden_state": True}
    (work / "draft" / "config.json").write_text(json.dumps(config))
    (work / "metrics.txt").write_text(vllm_scrape(counted(run)))


def _torchspec(run: Path, work: Path) -> None:
    _torch_files("torchspec", run, work)
    shutil.copytree(run / "draft", work / "draft")
    (work / "metrics.txt").write_text(vllm_scrape(counted(run)))


def _vllm(run: Path, work: Path) -> None:
    _own(run, work)
    (work / "server.log").write_text("\n".join(vllm_line(part, "0.32") for part in windows(counted(run).steps)) + "\n")


def _sglang(run: Path, work: Path) -> None:
    (work / "states").symlink_to(run / "train", target_is_directory=True)
    shutil.copytree(run / "draft", work / "draft")
    _sglang_log(run, work)
    answers = [sglang_answer(steps, 0, "0.5.23") for steps in counted(run).requests]
    (work / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))


LAYOUTS: dict[str, Callable[[Path, Path], None]] = {
    "specforge": _specforge, "speculators": _speculators, "modelopt": _modelopt, "torchspec": _torchspec, "vllm": _vllm,
    "sglang": _sglang, "decide": _own, "bundle": _own,
}


def counted(run: Path) -> Simulated:
    """The counts that the capture itself recorded, so that every report agrees with it."""
    requests = [trace.accepted_counts.tolist() for trace in open_source(run / "capture")]
    return Simulated(requests, [0] * len(requests))


def _sglang_log(run: Path, work: Path) -> None:
    steps = counted(run).steps
    lines = [sglang_args(), *(sglang_line(part, "0.5.23") for part in windows(steps))]
    (work / "server.log").write_text("\n".join(lines) + "\n")


def _torch_files(name: str, run: Path, folder: Path) -> None:
    """The training states as another stack's torch files, which keep the last state after the final norm."""
    for number, sample in enumerate(open_source(run / "train")):
        WRITERS[name](folder, normed(sample), number)


def normed(sample: Sample) -> Sample:
    """With its last state after the target's final norm."""
    weight = load_file(TARGET / "model.safetensors")["model.norm.weight"].double()
    last = sample.states[:, -1].double()
    normed = last / (last.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    states = torch.cat([sample.states[:, :-1], normed[:, None].to(sample.states.dtype)], dim=1)
    return Sample(sample.name, sample.token_ids, states, sample.loss_mask, sample.labels)
