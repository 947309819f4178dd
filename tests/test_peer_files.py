"""Files both ways: what is written here read by speculators' and SpecForge's own code, and what they write read here, each
tensor bit for bit (recipes/foreign/own_files.py, scripts/env-speculators).

SpecForge's script that writes offline data is not in its package; what its package writes is the store of its trainer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import run_recipe, trained
from safetensors.torch import load_file, save_file
from state_files import a_sample
from support import VOCAB, save_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.pipeline.convert_data import convert_data
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

ROWS = (5, 9, 1, 12)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {}, "many": {"layers": 2, "norm_before_residual": True, "fc_norm": True, "norm_output": True, "sliding_window": 6,
                          "attention_bias": True, "attention_output_bias": True, "slots": 4, "boundaries": (1, 2, 4, 5)},
    "qwen": {"qk_norm": True, "norm_before_fc": True}, "whole vocabulary": {"draft_vocab": VOCAB},
}
FORGED: dict[str, dict[str, Any]] = {"plain": {}, "fc_norm": {"fc_norm": True, "norm_before_head": False},
                                     "target width": {"target_hidden_size": 48}}

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


def same(mine: Tensor, theirs: Tensor) -> None:
    """Bit for bit; numbers that only became wider count as the same."""
    assert mine.shape == theirs.shape
    if mine.is_floating_point():
        assert torch.equal(mine.float().view(torch.int32), theirs.float().view(torch.int32))
    else:
        assert torch.equal(mine.long(), theirs.long())


def named(path: Path) -> list[dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        number, _, name = key.partition(".")
        found.setdefault(int(number), {})[name] = tensor
    return [found[i] for i in sorted(found)]


class Place:
    """A folder, and what the peers are to do in it, at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[list[str]] = []

    def ask(self, job: str, source: Path, name: str) -> Path:
        out = self.folder / name
        self.jobs.append([job, str(source), str(out)])
        return out

    def run(self) -> None:
        (self.folder / "jobs.json").write_text(json.dumps(self.jobs))
        run_recipe("speculators", "own_files.py", self.folder / "jobs.json", needs=("speculators", "specforge"))


def some_samples(dtype: torch.dtype) -> list[Sample]:
    samples = [a_sample(rows, seed=rows, dtype=dtype) for rows in ROWS]
    return [replace(sample, index=i, claimed_norm="pre") for i, sample in enumerate(samples)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Data in every form that is written here, through the peers; and data that they write."""
    place = Place(tmp_path_factory.mktemp("data"))
    words = {f"w{i}": i for i in range(50)} | {"[UNK]": 50}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), unk_token="[UNK]").save_pretrained(
        place.folder / "tokenizer")
    for name, dtype in DTYPES.items():
        samples = some_samples(dtype)
        plain, source = place.folder / f"plain-{name}", place.folder / f"in-{name}.safetensors"
        plain.mkdir()
        for sample in samples:
            write_sample(plain / f"hs_{sample.index}.safetensors", sample)
        convert_data(plain, place.folder / f"speculators-{name}", "speculators")
        post = place.folder / f"post-{name}"
        post.mkdir()
        for sample in samples:
            write_sample(post / f"hs_{sample.index}.safetensors", replace(sample, claimed_norm="post"), said_norm=True)
        convert_data(post, place.folder / f"specforge-{name}", "specforge")
        place.ask("speculators_reads_states", plain, f"plain-{name}.out")
        place.ask("speculators_reads_data", place.folder / f"speculators-{name}", f"speculators-{name}.out")
        place.ask("speculators_reads_states", place.folder / f"speculators-{name}" / "hidden_states", f"states-{name}.out")
        place.ask("specforge_reads_data", place.folder / f"specforge-{name}", f"specforge-{name}.out")
        held = {f"{s.index}.{key}": tensor for s in samples
                for key, tensor in (("input_ids", s.token_ids), ("loss_mask", s.loss_mask.long()), ("states", s.states))}
        save_file(held, source)
        place.ask("speculators_writes_data", source, f"theirs-{name}")
        place.ask("speculators_writes_eight_bits", source, f"eight-{name}")
        place.ask("speculators_reads_states", place.folder / f"eight-{name}", f"eight-{name}.out")
        place.ask("specforge_writes_data", source, f"forged-{name}")
    place.run()
    return place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "states"])
def test_speculators_reads_our_states(form: str, dtype: str, data: Place) -> None:
    read = named(data.folder / f"{form}-{dtype}.out")
    for sample, theirs in zip(some_samples(DTYPES[dtype]), read, strict=True):
        assert theirs["hidden_states"].dtype == sample.states.dtype
        same(sample.states, theirs["hidden_states"])
        same(sample.token_ids, theirs["token_ids"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_the_trainers_read_our_data(form: str, dtype: str, data: Place) -> None:
    read = named(data.folder / f"{form}-{dtype}.out")
    for sample, theirs in zip(some_samples(DTYPES[dtype]), read, strict=True):
        same(sample.token_ids, theirs["input_ids"])
        same(sample.states[:, :-1].flatten(1), theirs["hidden_states"])
        same(sample.states[:, -1], theirs["last"])
        assert sample.loss_mask is not None
        mask = sample.loss_mask.long()
        if form == "specforge":
            mask[-1] = 0  # it never trains on the last row
        same(mask, theirs["loss_mask"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "format"), [("theirs", "speculators"), ("forged", "speculators-v0")])
def test_data_of_the_trainers_is_read_here(form: str, format: str, dtype: str, data: Place) -> None:
    source = open_source(data.folder / f"{form}-{dtype}")
    assert source.format == format
    read = [sample for sample in source if isinstance(sample, Sample)]
    # speculators shuffles its rows.
    ours = {tuple(sample.token_ids.tolist()): sample for sample in some_samples(DTYPES[dtype])}
    assert len(read) == len(ours) and not source.skipped
    for sample in read:
        mine = ours.pop(tuple(sample.token_ids.tolist()))
        assert sample.states.dtype == mine.states.dtype
        same(mine.states, sample.states)
        assert mine.loss_mask is not None and sample.loss_mask is not None
        same(mine.loss_mask, sample.loss_mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_of_speculators_are_made_as_wide_here(dtype: str, data: Place) -> None:
    read = [s for s in open_source(data.folder / f"eight-{dtype}", "plain") if isinstance(s, Sample)]
    theirs = named(data.folder / f"eight-{dtype}.out")
    for mine, other, original in zip(read, theirs, some_samples(DTYPES[dtype]), strict=True):
        assert mine.states.dtype == other["hidden_states"].dtype == torch.bfloat16
        same(mine.states, other["hidden_states"])
        assert float((mine.states.float() - original.states.float()).norm() / original.states.float().norm()) < 0.1


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Drafts in the forms that are written here, through the peers; and drafts that they write."""
    place = Place(tmp_path_factory.mktemp("drafts"))
    target = save_target(place.folder / "target", tied=False)
    for name, switches in DRAFTS.items():
        for dtype in ("bfloat16", "float32"):
            native, theirs = place.folder / f"native {name} {dtype}", place.folder / f"speculators {name} {dtype}"
            trained(native, 3, DTYPES[dtype], **switches)
            convert_draft(native, "speculators", theirs, target=target)
            place.ask("speculators_reads_draft", theirs, f"speculators {name} {dtype}.out")
            place.ask("speculators_writes_draft", theirs, f"saved {name} {dtype}")
    place.ask("speculators_converts_draft", place.folder / "native plain bfloat16", "converted")
    for name, switches in FORGED.items():
        for dtype in ("bfloat16", "float32"):
            native = place.folder / f"forge {name} {dtype}"
            trained(native, 4, DTYPES[dtype], **switches)
            # There and back, so that what SpecForge gets is what convert writes.
            convert_draft(native, "native", place.folder / f"native-{name}-{dtype}")
            place.ask("specforge_reads_draft", place.folder / f"native-{name}-{dtype}", f"specforge {name} {dtype}.out")
        place.ask("specforge_writes_draft", place.folder / f"native-{name}-bfloat16", f"exported {name}")
    place.run()
    return place


def same_tensors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", DRAFTS)
def test_speculators_holds_what_we_wrote(name: str, dtype: str, drafts: Place) -> None:
    same_tensors(load_file(drafts.folder / f"speculators {name} {dtype}" / "model.safetensors"),
                 load_file(drafts.folder / f"speculators {name} {dtype}.out"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FORGED)
def test_specforge_holds_what_we_wrote(name: str, dtype: str, drafts: Place) -> None:
    same_tensors(load_file(drafts.folder / f"native-{name}-{dtype}" / "model.safetensors"),
                 load_file(drafts.folder / f"specforge {name} {dtype}.out"))


@pytest.mark.parametrize(("theirs", "native"), [
    *((f"saved {name} {dtype}", f"native {name} {dtype}") for name in DRAFTS for dtype in ("bfloat16", "float32")),
    ("converted", "native plain bfloat16"), *((f"exported {name}", f"forge {name} bfloat16") for name in FORGED),
])
def test_drafts_that_they_saved_are_read_here(theirs: str, native: str, drafts: Place) -> None:
    writer: Any = "specforge" if theirs.startswith("exported") else None
    was = load_checkpoint(drafts.folder / native)
    now = load_checkpoint(drafts.folder / theirs, writer=writer)
    assert not now.missing and not now.unexpected
    same_tensors(was.tensors | was.idle, now.tensors | now.idle)
    apart = {"dialect", "boundaries", "max_position_embeddings"}
    assert now.config.model_dump(exclude=apart) == was.config.model_dump(exclude=apart)
    if theirs == "converted":
        assert was.layer_ids is not None and now.layer_ids is None, "its converter takes them as an argument, not from the file"
    elif was.layer_ids is not None:
        assert now.config.boundaries == was.config.boundaries
