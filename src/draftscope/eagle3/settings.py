"""How a draft is trained: every choice in which trainers differ, with our own as the default.

What other trainers choose is in `recipes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Alignment = Literal["served", "same", "next"]
LossKind = Literal["soft-ce", "kl", "reverse-kl", "jsd", "ce", "tv", "nla", "lk-hybrid"]
Normaliser = Literal["rows", "rows-eps", "positions"]
Outside = Literal["masked", "kept"]
NoiseKind = Literal["normal", "uniform"]
Schedule = Literal["cosine", "linear", "constant"]
Optimizer = Literal["adamw", "muon"]
Precision = Literal["float32", "bfloat16"]

ROWS_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train.

    Attributes:
        ttt_steps: draft steps trained at once; decay: weight of step k is decay^k.
        loss: of one row (`rowloss.py`).
        normaliser: what a step's sum is divided by. `rows`: the rows taught; `rows-eps`: these and 1e-5; `positions`: all rows
            of the batch as it is padded, taught or not.
        outside: rows whose teacher's first choice lies outside the draft vocabulary are `masked`, or `kept`.
        alignment: which rows are supervised (`loss.supervised_rows`).
        past_end: with `same`, also the row whose teacher would be the index after the last, where the last token's mask is 1:
            it is taught the uniform distribution, as logits padded with zeros give it, if token 0 is in the draft vocabulary.
        first_position: rotary position of row 0.
        window_moves: under a sliding window, the keys in reach move on with each draft step, as they do while serving.
        noise: on features, in units of each column's root mean square: its standard deviation, or its reach if uniform.
        batch_tokens: tokens of a batch once padded, of all processes together.
        learning_rate, head_rate: its peak; the head takes `head_rate` times as much, and is frozen at 0.
        warmup, warmup_share: steps of linear warmup, or their share of all steps, which then counts.
        schedule, final_rate: after it, down to `final_rate` times the peak.
        weight_decay, matrix_decay: of AdamW; of Muon's matrices, None = the same.
        optimizer: of the matrices inside the draft (`descent.Descent`).
        precision: of the operands of the matrix products; weights and sums stay in float32.
        scaled: features are divided by their columns' root mean square while training, and `fc` starts near their mean.
    """

    ttt_steps: int = 3
    epochs: int = 10
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    head_rate: float = 0.2
    warmup: int = 50
    final_rate: float = 0.02
    weight_decay: float = 0.02
    clip: float = 1.0
    decay: float = 0.8
    noise: float = 0.0
    alignment: Alignment = "served"
    optimizer: Optimizer = "adamw"
    precision: Precision = "float32"
    seed: int = 0
    loss: LossKind = "soft-ce"
    normaliser: Normaliser = "rows"
    outside: Outside = "masked"
    past_end: bool = False
    first_position: int = 0
    window_moves: bool = True
    noise_kind: NoiseKind = "normal"
    warmup_share: float | None = None
    schedule: Schedule = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    matrix_decay: float | None = None
    scaled: bool = True
