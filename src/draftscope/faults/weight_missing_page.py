"""What docs/ and `diagnose --explain` say of weight-missing: it has more variants than a rule's module has room for."""

from __future__ import annotations

from draftscope.faults.base import Page, Trace

_RECORDED = "--draft, --serve (with fc_output and draft_states), --target"
_TRAINED = "--draft, --train, --target"


def _engine(says: str, shows: str) -> Trace:
    return Trace(says=says, input=_RECORDED, shows=shows, rung="measured")


def _file(says: str, shows: str, given: str = "--draft") -> Trace:
    return Trace(says=says, input=given, shows=shows, rung="trained")


PAGE = Page(
    symptom="Accept length near 1 with a healthy server and a training that looked fine; loaders warn of nothing.",
    traces={
        "engine: lm_head": _engine("the loader leaves the head at its initial value",
                                   "the layer agrees; the drafted ids are the head's choices under no map"),
        "engine: fc": _engine("the loader leaves fc at its initial value", "fc over the recorded input gives another output"),
        "engine: layer": _engine("the loader leaves the decoder layer at its initial values (`midlayer` against `layers.0`)",
                                 "fc agrees, the layer's output is another"),
        "engine: q_proj": _engine("one projection is left at its initial value", "fc agrees, the layer's output is another"),
        "engine: gain of hidden_norm": _engine("a norm's gain is left at 1", "the layer agrees once that gain is 1"),
        "engine: gain of the final norm": _engine("the final norm's gain is left at 1, or the norm is left out",
                                                  "the drafted ids agree once that gain is 1"),
        "engine: the target's head": _engine("the engine shares the target's head with the draft",
                                             "the drafted ids are the choices of the target's first rows"),
        "engine: gate and up swapped": _engine("the stacked loading puts gate and up in each other's place",
                                               "the layer agrees once they are swapped"),
        "engine: o transposed": _engine("a square matrix is loaded the wrong way round", "the layer agrees once it is turned"),
        "engine: the target's embedding": _engine("the engine overwrites the draft's own embedding with the target's",
                                                  "the layer agrees once the target's embedding goes in"),
        "checkpoint: lm_head": _file("the exporter left the head out", "the name is absent"),
        "checkpoint: fc": _file("the exporter left fc out", "the name is absent"),
        "checkpoint: layer": _file("the exporter left the decoder layer out, or under a prefix", "the names are absent"),
        "checkpoint: q_proj": _file("the exporter left one projection out", "the name is absent"),
        "checkpoint: embedding": _file("an embedding whose rows belong to other tokens lies beside the draft",
                                       "on training states the target's embedding serves the draft far better", _TRAINED),
        "checkpoint: gate and up swapped": _file("the exporter's renaming swapped gate and up",
                                                 "on training states the draft does well only with them swapped", _TRAINED),
        "checkpoint: k and v swapped": _file("the exporter cut a stacked matrix in the wrong order",
                                             "on training states the draft does well only with them swapped", _TRAINED),
        "checkpoint: o transposed": _file("a matrix was written the wrong way round",
                                          "on training states the draft does well only with it turned", _TRAINED),
        "checkpoint: gain of post_attention_layernorm": _file("a norm was exported before its gain was loaded",
                                                              "it holds nothing but ones, and the other norms do not"),
        "checkpoint: the target's head": _file("the target's head was exported in place of the trained one",
                                               "lm_head is not the source's, and the source does better",
                                               "--draft, --source-draft, --train, --target"),
        "checkpoint: head rows in another order": _file(
            "head and map were written in different orders",
            "on training states another order of the map's own ids is right for the draft's choices", _TRAINED),
        "checkpoint: step 0": _file("a freshly made module was exported (keys with a prefix, a state that was never gathered)",
                                    "every norm is exactly 1 and the matrices scatter like an initialiser's"),
        "checkpoint: an early one": _file("an early state of the training was exported",
                                          "nearly every tensor is another than the source's, which does better",
                                          "--draft, --source-draft, --train, --target"),
        "checkpoint: mask token outside the table": Trace(
            says="the embedding was widened for a mask token and not exported so", input="--draft", rung="none",
            shows="mask_token_id is no row of the embedding"),
    },
    lookalikes={
        "vocab-map": "there each draft id always becomes one token; with other weights it does not",
        "tied-head": "the same rows in the engine, and the flag set in config.json",
        "quant-inherit": "the stages agree once the checkpoint's matrices are rounded",
        "config-flag": "the stages agree once a switch is turned",
        "residual-missing": "the layer agrees once its residual is left out",
        "train-budget": "no other reading of the file, and no source, does better",
    },
    unseen={
        "an early checkpoint without its source": "looks as after too little training, which it is; the trainer's log or "
                                                  "--source-draft tells",
        "the target's head in the file without the source": "a draft may be trained with it; told only where it then fails",
        "an untrained tensor whose loss costs nothing": "state-level evidence alone, from draft_states",
    },
    reports=("sglang issue #27829", "sglang PR #27908", "vllm PR #28549", "Model-Optimizer PR #1621"),
)
