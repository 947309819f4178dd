"""A pair of target and draft, run with a fault planted: training data, capture and counters written as real ones are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftscope.boundaries import Boundary
from draftscope.eagle3.altered import altered
from draftscope.eagle3.checkpoint import build_draft, initial_value, load_checkpoint, target_ids
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Summary, summarise
from draftscope.eagle3.train import Settings, train
from draftscope.eagle3.tree import TreeShape
from draftscope.engines.transformers import Capture, description
from draftscope.faults.plant import Build, Plant
from draftscope.faults.training import train_again
from draftscope.faults.writing import STALE, Texts, Writer, Written, disturbed, elsewhere
from draftscope.states import plain
from draftscope.states.types import Sample
from draftscope.target.model import Target
from draftscope.target.quantised import quantised
from draftscope.target.spoiling import turn
from draftscope.target.wiring import Wiring

EARLY = 6
"""Training sequences after which an early checkpoint was saved."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids with an answer from `prompt_length` on."""

    token_ids: list[int]
    prompt_length: int


@dataclass(slots=True)
class Run:
    """Where the files of a run are, and what the engine counted."""

    train: Path
    serve: Path
    draft: Path
    metrics: Path
    summary: Summary
    source_draft: Path | None = None
    heldout: Path | None = None
    conversations: Path | None = None
    logs: tuple[Path, ...] = ()


@dataclass
class Rig:
    """A healthy pair and what it is given to do.

    Attributes:
        checkpoint: the draft's folder.
        prompts: token ids, served greedily.
        conversations: what the draft is said to have been trained on.
        k, tree, max_new, rows: as `generate` takes them.
    """

    target: Target
    checkpoint: Path
    prompts: Sequence[list[int]]
    conversations: Sequence[Conversation]
    k: int = 3
    max_new: int = 48
    rows: int = 8
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    tree: TreeShape | None = None

    @property
    def theta(self) -> float:
        """The base of the draft's own rotary table."""
        config = load_checkpoint(self.checkpoint, target_layers=self.target.layers).config
        return float(config.rope_parameters.get("rope_theta", 1e4))

    def run(self, plant: Plant, out: Path) -> Run:
        """Write everything for a set-up into a folder of its own."""
        train, serve, draft = out / "train", out / "capture", out / "draft"
        self.write_training(plant, train)
        logs = (train_again(self, plant, out / "run"),) if plant.training else ()
        self.write_checkpoint(plant, draft)
        summary = self.serve(plant, draft, serve)
        metrics = self.report(plant, summary, out)
        run = Run(train, serve, draft, metrics, summary, self.write_source(plant, out / "source"), logs=logs)
        if plant.heldout:
            run.heldout = out / "heldout"
            self.write_samples(plant, self.written(plant)[:: plant.part], run.heldout)
        if plant.dump not in ("", "written twice"):
            run.conversations = out / "conversations.jsonl"
            self.list_conversations(plant, run.conversations)
        return run

    def report(self, plant: Plant, summary: Summary, folder: Path) -> Path:
        """Acceptance as it is told: the engine's counts, or as planted."""
        if plant.reported == "simulated":
            path, length = folder / "server.log", 1 + self.k / 2
            line = f"Decode batch, #running-req: 8, accept len: {length:.2f}, accept rate: {(length - 1) / self.k:.2f}, "
            path.write_text("\n".join([f"export SGLANG_SIMULATE_ACC_LEN={length}", *[line] * 9]))
            return path
        told: dict[str, object] = {
            "counts": {"schema": "draftscope.generate/1", "k": self.k, "drafts": summary.steps,
                       "accepted_per_position": summary.accepted},
            "bonus left out": {"accept_length": (summary.accept_length or 1) - 1},
            "conditional as joint": {"per_position": [share or 0.0 for share in summary.conditional]},
        }
        path = folder / "counters.json"
        path.write_text(json.dumps(told[plant.reported]))
        return path

    def written(self, plant: Plant) -> list[Written]:
        """The training texts with their masks, as the data writer has them."""
        writer = Writer(self.target)
        prompts = [c.token_ids[: c.prompt_length] for c in self.conversations]
        answers = [c.token_ids[c.prompt_length :] for c in self.conversations]
        if plant.dump == "of other conversations":
            half = len(prompts) // 2
            prompts, answers = prompts[half:], answers[half:]
        texts = writer.conversations(prompts, answers, plant.texts, max_new=self.max_new, stop_ids=self.stop_ids,
                                     turns=plant.loss_mask == "every turn")
        return writer.masked(texts, plant.loss_mask, plant.part, plant.by)

    def write_training(self, plant: Plant, folder: Path) -> None:
        """Training states, taken and labelled as the data writer does."""
        texts = self.written(plant)
        if plant.dump == "written twice":
            texts += texts[:: plant.part]
        if plant.dump == "other order":
            texts = texts[1:]
        each = len(texts) // plant.part
        gone = range(each, 2 * each) if plant.dump == "part missing" else range(0)
        self.write_samples(plant, texts, folder, gone)

    def write_samples(self, plant: Plant, texts: Sequence[Written], folder: Path, gone: Sequence[int] = ()) -> None:
        """Samples of these texts, but for those whose number is in `gone`."""
        folder.mkdir(parents=True, exist_ok=True)
        target = disturbed(self.target, STALE) if plant.texts.author == "stale target" else self.target
        labels = plant.labels or (*(f"boundary {b.index}" for b in plant.train.slots), "last")
        norm = self.target.parts.final_norm
        for i, text in enumerate(texts):
            if i in gone:
                continue
            ids = torch.tensor([text.token_ids])
            wiring = plant.train_ranks[i % len(plant.train_ranks)] if plant.train_ranks else plant.train
            with torch.inference_mode():
                forward = target.forward(ids, wiring.taps())
            count = torch.tensor([ids.shape[1]])
            slots = wiring.apply(forward.taps, count, requests=(i,), norm=norm)
            last = Wiring((), spoilers=plant.last).apply(forward.last[:, :, None], count, requests=(i,), norm=norm)
            states = torch.cat([slots, last], 2)[0].to(torch.bfloat16)
            mask = torch.tensor(text.answer, dtype=torch.bool)
            name = f"hs_{i}.safetensors"
            plain.write_sample(folder / name, Sample(name, ids[0], states, mask, tuple(labels), i))
        plant.rewritten.apply("train", folder, len(plant.train.slots))

    def list_conversations(self, plant: Plant, path: Path) -> None:
        """The conversations that the training data was to be made from, as token ids, one a line."""
        lines = []
        texts = self.written(replace(plant, dump="", texts=Texts()))
        for text in texts[: len(texts) // 2] if plant.dump == "of other conversations" else texts:
            lines.append(json.dumps({"token_ids": text.token_ids, "loss_mask": [int(on) for on in text.answer]}))
        path.write_text("\n".join(lines) + "\n")

    def write_checkpoint(self, plant: Plant, folder: Path) -> None:
        """The draft's checkpoint as its exporter leaves it."""
        folder.mkdir(parents=True, exist_ok=True)
        source = self.checkpoint
        sequences = plant.training_sequences or (EARLY if plant.state == "early" else None)
        if sequences is not None:
            source = self.train_anew(plant, sequences, folder.parent / "trained")
        if plant.training == "next state seen":
            source = folder.parent / "run" / "run" / "draft"
        tensors = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        self._build(plant.draft, tensors, config)
        if plant.state == "step 0":
            tensors = {name: initial_value(name, tensor, 1).to(tensor.dtype) if tensor.is_floating_point() else tensor
                       for name, tensor in tensors.items()}
        tensors = altered(tensors, plant.export, load_checkpoint(source).config, self.target.parts)
        if plant.stored_map == "absolute":
            tensors["d2t"] = target_ids(tensors["d2t"], load_checkpoint(source).config)
        if plant.embedding == "trained":
            _own_basis(tensors, self.target.parts.embedding)
        elif plant.embedding:
            table = self.target.parts.embedding
            table = turn(table, "orthogonal") if plant.embedding == "rotated" else table.roll(1, 0)
            tensors["embed_tokens.weight"] = table.to(tensors["fc.weight"].dtype)
        if plant.poison:
            tensors[plant.poison] = tensors[plant.poison].clone().index_fill_(0, torch.tensor([3]), float("nan"))
        dropped = {name for name in tensors if name.startswith(plant.drop)} if plant.drop else set()
        if "d2t" in plant.drop:
            dropped.add("t2d")
        save_file({name: tensor for name, tensor in tensors.items() if name not in dropped}, folder / "model.safetensors")
        config = {key: value for key, value in (config | dict(plant.config)).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    def write_source(self, plant: Plant, folder: Path) -> Path | None:
        """The checkpoint that it was exported from, where that is at hand."""
        if not plant.source:
            return None
        self.write_checkpoint(Plant(serve=plant.serve, train=plant.train, draft=plant.draft), folder)
        return folder

    def _build(self, build: Build, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        """A draft with norms or a bias before `fc` that does nearly as the trained one with them, and badly without; or of two
        layers.

        Gains are the states' usual sizes times factors that `fc` takes back; the bias is what `fc` makes of the states' mean.
        """
        if not build:
            return
        ids = torch.tensor([self.conversations[0].token_ids])
        boundaries = load_checkpoint(self.checkpoint, target_layers=self.target.layers).config.boundaries or ()
        with torch.inference_mode():
            slots = self.target.forward(ids, Plant.healthy(boundaries).serve.slots).taps[0].float()
        fc, count, wide = tensors["fc.weight"].float(), slots.shape[1], slots.shape[2]
        if build == "two layers":
            _second_layer(tensors, config)
            return
        if build == "fc_bias":
            mean = slots.flatten(1).mean(0)
            along = mean / mean.norm()
            tensors["fc.bias"] = (fc @ mean).to(tensors["fc.weight"].dtype)
            tensors["fc.weight"] = (fc - (fc @ along)[:, None] * along).to(tensors["fc.weight"].dtype)
            config["bias"] = True
            return
        per_slot = build == "fc_norm"
        states = slots if per_slot else slots.flatten(1)
        sizes = states.square().mean(-1).sqrt().median(0).values
        factors = torch.tensor([4.0, 0.25, 1.0]).repeat(count)[:count].repeat_interleave(wide)
        gains = (sizes.repeat_interleave(wide) if per_slot else sizes) * factors
        tensors["fc.weight"] = (fc / factors).to(tensors["fc.weight"].dtype)
        names = [f"fc_norm.{i}.weight" for i in range(count)] if per_slot else ["input_norm.weight"]
        for name, gain in zip(names, gains.split(wide if per_slot else count * wide), strict=True):
            tensors[name] = gain.to(tensors["fc.weight"].dtype).clone()
        config[build] = True

    def train_anew(self, plant: Plant, sequences: int, folder: Path) -> Path:
        """A draft of the same shape, trained once over so few sequences."""
        checkpoint = load_checkpoint(self.checkpoint, target_layers=self.target.layers)
        few = replace(self, conversations=self.conversations[:sequences])
        few.write_training(plant, folder / "data")
        examples = load_examples(plain.open(folder / "data"), self.target.parts)
        train(
            examples,
            self.target.parts,
            checkpoint.config,
            checkpoint.tensors.get("d2t"),
            folder / "run",
            settings=Settings(epochs=1, batch_tokens=512),
        )
        return folder / "run" / "draft"

    def serve(self, plant: Plant, draft_folder: Path, folder: Path) -> Summary:
        """Serve the prompts with the engine as planted, recording what the draft receives."""
        # No engine starts with a checkpoint that is refused: what is captured is of the one before it.
        served = self.checkpoint if plant.refused else draft_folder
        last = (Boundary(self.target.layers, "post"),)
        wiring = replace(plant.serve, slots=last) if plant.mode == "eagle" else plant.serve
        checkpoint = load_checkpoint(served, target_layers=self.target.layers)
        draft = build_draft(checkpoint, self.target.parts, plant.engine)
        claimed = [b.index for b in Plant.healthy(checkpoint.config.boundaries or ()).serve.slots]
        says = description(model=str(self.target.folder.name), draft=draft_folder.name, layer_ids=claimed, k=self.k,
                           tree=self.tree)
        if plant.sampling is not None:
            says["temperature"] = plant.sampling.temperature
        capture = Capture(folder, says)
        writer, prompts = Writer(self.target), list(self.prompts)
        if plant.texts.domain:
            prompts = elsewhere(prompts, writer.markers(), self.target.parts.vocab)
        results = generate(
            quantised(self.target, plant.precision) if plant.precision else self.target,
            draft,
            [writer.prompt(prompt, plant.texts.serve) for prompt in prompts],
            wiring=wiring,
            k=self.k,
            tree=self.tree,
            sampling=plant.sampling,
            max_new=self.max_new,
            stop_ids=self.stop_ids,
            rows=self.rows,
            observer=capture,
        )
        capture.close()
        plant.rewritten.apply("serve", folder, len(plant.serve.slots))
        return summarise(results, self.k if self.tree is None else self.tree.steps)


def _second_layer(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """A second layer of the first one's own projections, as far as they read the stream, whose MLP counts a third."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensor, part = tensors[name], name.removeprefix("midlayer.")
        if part.startswith(("self_attn.q", "self_attn.k", "self_attn.v")) and tensor.ndim == 2:
            tensor = tensor[:, tensor.shape[1] // 2 :]
        elif part == "hidden_norm.weight":
            part = "input_layernorm.weight"
        elif part == "input_layernorm.weight":
            continue
        tensors[f"layers.1.{part}"] = (tensor / 3 if "down_proj" in part else tensor).clone()
    config["num_hidden_layers"] = 2


def _own_basis(tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    """An embedding of the draft's own: the target's with its channels in another order, and a draft trained with that one."""
    order = torch.randperm(embedding.shape[1], generator=torch.Generator().manual_seed(7))
    tensors["embed_tokens.weight"] = embedding[:, order].to(tensors["fc.weight"].dtype)
    name = "midlayer.input_layernorm.weight"
    tensors[name] = tensors[name][order]
    for part in ("q", "k", "v"):
        name = f"midlayer.self_attn.{part}_proj.weight"
        wide = tensors[name].shape[1] // 2
        tensors[name] = torch.cat([tensors[name][:, :wide][:, order], tensors[name][:, wide:]], 1)
