"""What speculators makes of draft checkpoints when training goes on from them: settings, and what was not in the files.

    python recipes/foreign/consume_speculators.py OUT.json DRAFT...

Needs the environment of scripts/env-speculators. Each draft's answer stands under its folder's name; `error` where it raised.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})

from safetensors.torch import load_file
from speculators.model import SpeculatorModel


def consume(draft: Path) -> dict[str, Any]:
    model = SpeculatorModel.from_pretrained(str(draft))
    stored = load_file(draft / "model.safetensors")
    held = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier_")}
    # A prefix may be taken off on the way in: the values tell.
    places = {name: own for name in stored for own in (name, name.partition(".")[2]) if own in held}
    arrived = {name: own for name, own in places.items() if bool((held[own].float() == stored[name].float()).all())}
    config = model.config
    return {
        "settings": {name: bool(getattr(config, name)) for name in
                     ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        "qk_norm": hasattr(model.layers[0].self_attn, "q_norm"), "layer_ids": config.eagle_aux_hidden_state_layer_ids,
        "rope": config.transformer_layer_config.rope_parameters, "initial": sorted(set(held) - set(arrived.values())),
        "nan": sorted(name for name, tensor in held.items() if tensor.is_floating_point() and bool(tensor.isnan().any())),
        "unused": sorted(set(stored) - set(arrived)),
        "head_of_verifier": bool((model.lm_head.weight == model.verifier_lm_head.weight).all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    answers: dict[str, Any] = {}
    for draft in asked.drafts:
        try:
            answers[draft.name] = consume(draft)
        except Exception as error:  # whatever it raises is the answer
            answers[draft.name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    asked.out.write_text(json.dumps(answers, indent=1, default=str))


if __name__ == "__main__":
    main()
