"""The steps of training-time test as another stack's own draft model takes them, for comparison.

    python recipes/foreign/draft_steps.py speculators|specforge INPUT OUT DRAFT [DRAFT ...]

INPUT.safetensors holds `token_ids` [T+1] and, for draft i, `i.features` [T, S, Ht]; each DRAFT is a checkpoint folder.
OUT.safetensors gets, for draft i, `i.input` [T, H] (what `fc` made of the slots), and `i.output.k` [T, H] and `i.logits.k` [T, D]
of step k = 0..2: what the head's norm received, and what the head gave. Rows past the end embed token 0. Needs the environment
of scripts/env-speculators.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS = 3


def speculators(folder: Path, features: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = Eagle3DraftModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    seen: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    model.fc.register_forward_hook(lambda module, args, result: seen.update(input=result[0]))
    model.norm.register_forward_pre_hook(lambda module, args: outputs.append(args[0][0]))
    model.lm_head.register_forward_hook(lambda module, args, result: logits.append(result[0]))
    rows = len(features)
    with torch.no_grad():
        model(hidden_states=features.flatten(1)[None], input_ids=token_ids[None, 1:], ttt_steps=STEPS,
              document_ids=torch.zeros(1, rows, dtype=torch.long))
    return seen | steps(outputs, logits)


def specforge(folder: Path, features: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    torch._dynamo.config.disable = True  # its norm is compiled, which needs a compiler
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask
    from transformers import LlamaConfig

    # As its exporter builds it (`export/checkpoint_io.py` materialize_draft): from_pretrained of newer transformers leaves the
    # rotary tables, which no checkpoint holds, unfilled.
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    rows = len(features)
    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    with torch.no_grad():
        hidden = first = model.project_hidden_states(features.flatten(1)[None])
        mask = prepare_decoder_attention_mask(torch.ones(1, rows, dtype=torch.bool), (1, rows), hidden, 0)
        cache: list[list[Tensor]] = [[], []]
        ahead = torch.nn.functional.pad(token_ids, (0, STEPS))
        for step in range(STEPS):
            embeds = model.embed_input_ids(ahead[None, 1 + step : 1 + step + rows])
            hidden = model.backbone(input_embeds=embeds, hidden_states=hidden, cache_hidden=cache, attention_mask=mask,
                                    position_ids=torch.arange(rows)[None], past_key_values=None, use_cache=False)
            outputs.append(hidden[0])
            logits.append(model.compute_logits(hidden)[0])
    return {"input": first[0]} | steps(outputs, logits)


def steps(outputs: list[Tensor], logits: list[Tensor]) -> dict[str, Tensor]:
    named = {f"output.{k}": tensor for k, tensor in enumerate(outputs)}
    return named | {f"logits.{k}": tensor for k, tensor in enumerate(logits)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stack", choices=["speculators", "specforge"])
    parser.add_argument("input", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = load_file(options.input)
    run = speculators if options.stack == "speculators" else specforge
    found: dict[str, Tensor] = {}
    for i, folder in enumerate(options.drafts):
        made = run(folder, held[f"{i}.features"], held["token_ids"])
        found |= {f"{i}.{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(found, options.out)


if __name__ == "__main__":
    main()
