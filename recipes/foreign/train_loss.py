"""The loss of every training-time-test step as another trainer's own code computes it, on given weights and data.

    python recipes/foreign/train_loss.py speculators|specforge DRAFT TARGET DATA OUT.json

DRAFT is a checkpoint folder, TARGET the folder of the target, DATA a safetensors file with, for sequence i, `i.token_ids` [T],
`i.states` [T, 4, H] (slots, then the last state before the final norm) and `i.loss_mask` [T]. speculators packs the sequences
into one, SpecForge pads them; each with its own collator and defaults. Needs the environment of scripts/env-speculators.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Sequence = dict[str, Tensor]


def speculators(draft: Path, target: Path, sequences: list[Sequence]) -> list[float]:
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.config.schema import LossArgs
    from speculators.train.data import CollateFn

    config = Eagle3DraftModel.config_class.from_pretrained(draft)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)
    model = Eagle3DraftModel.from_pretrained(draft, config=config).float().eval()
    model.load_verifier_weights()
    items = []
    for held in sequences:
        length = len(held["token_ids"])
        items.append({
            "hidden_states": held["states"][:, :-1].flatten(1), "input_ids": held["token_ids"],
            "verifier_last_hidden_states": held["states"][:, -1], "loss_mask": held["loss_mask"],
            "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
        })
    rows = sum(len(held["token_ids"]) - 1 for held in sequences) + 5
    batch = CollateFn(rows, config.transformer_layer_config.hidden_size, dtype=torch.float32, preprocess=shift_batch)(items)
    batch.pop("error_records")
    defaults = LossArgs()
    call, _ = model.get_trainer_kwargs(loss_fn=defaults.loss_fn or "kl_div", loss_implementation="eager",
                                       ttt_steps=defaults.ttt_steps, ttt_step_loss_decay=defaults.ttt_step_loss_decay)
    with torch.no_grad():
        _, loss, metrics = model(**batch, **call)
    return [*(float(metrics[f"loss_{k}_sum"]) for k in range(defaults.ttt_steps)), float(loss)]


def specforge(draft: Path, target: Path, sequences: list[Sequence]) -> list[float]:
    torch.compile = lambda function=None, **_: function or (lambda f: f)  # which needs a compiler
    # Its loss is a kernel that only a GPU runs; the file holds a reference of it, which is used here.
    kernels, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    kernels.jit, kernels.language, language.constexpr = (lambda f: f), language, int
    sys.modules |= {"triton": kernels, "triton.language": language}
    from specforge.core import loss as its_loss

    del sys.modules["triton"], sys.modules["triton.language"]
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.config.schema import TrainingConfig
    from specforge.data.utils import DataCollatorWithPadding
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    its_loss.LogSoftmaxLoss.apply = its_loss._compute_loss
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(draft)).eval()
    model.load_state_dict(load_file(draft / "model.safetensors"), strict=False)
    weights = load_file(target / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    norm, eps = weights["model.norm.weight"], LlamaConfig.from_pretrained(target).rms_norm_eps
    samples = []
    for held in sequences:
        last = held["states"][:, -1]  # its files hold this state after the norm
        last = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps) * norm
        samples.append(normalize_offline_sample({
            "aux_hidden_state": held["states"][:, :-1].flatten(1)[None], "hidden_state": last[None],
            "input_ids": held["token_ids"], "loss_mask": held["loss_mask"].long(),
        }, 4096))
    batch = DataCollatorWithPadding()(samples)
    whole = OnlineEagle3Model(model, length=TrainingConfig().ttt_length, attention_backend="sdpa")

    def ahead(x: Tensor) -> Tensor:
        from specforge.utils import padding

        return padding(x, left=False)

    with torch.no_grad():
        steps = whole(input_ids=ahead(batch["input_ids"]), attention_mask=batch["attention_mask"],
                      target=ahead(batch["target"]) @ head.T, loss_mask=batch["loss_mask"][..., None],
                      hidden_states=batch["hidden_state"])[0]
    decay = Eagle3TrainStrategy(whole).ploss_decay
    return [*map(float, steps), float(sum(decay**k * x for k, x in enumerate(steps)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stack", choices=["speculators", "specforge"])
    for name in ("draft", "target", "data", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    held = load_file(asked.data)
    count = len({name.partition(".")[0] for name in held})
    sequences = [{name: held[f"{i}.{name}"] for name in ("token_ids", "states", "loss_mask")} for i in range(count)]
    run = speculators if asked.stack == "speculators" else specforge
    asked.out.write_text(json.dumps(run(asked.draft, asked.target, sequences)))


if __name__ == "__main__":
    main()
