"""What other trainers choose, as data: each choice with where their released code makes it.

SafeAILab/EAGLE as of 2026-02 (`eagle/traineagle3/`), SpecForge 0.2.0, speculators 0.9.0. A preset sets the choices here; what a
preset does not reproduce stands in `beyond`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

PresetName = Literal["safeai", "specforge", "speculators"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A choice: a field of `Settings` or of `DraftConfig`, its value, and the file (and name in it) that says so."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Preset:
    """A trainer's recipe.

    Attributes:
        settings, shape: facts about fields of `Settings`, and of `DraftConfig`.
        target_rope: the draft takes the target's rope parameters; where that is said.
        beyond: what of the recipe is not reproduced.
    """

    name: PresetName
    version: str
    settings: tuple[Fact, ...]
    shape: tuple[Fact, ...]
    beyond: tuple[str, ...]
    target_rope: str = field(default="")

    @property
    def chosen(self) -> dict[str, Any]:
        """Fields of `Settings`."""
        return {fact.name: fact.value for fact in self.settings}

    @property
    def shaped(self) -> dict[str, Any]:
        """Fields of `DraftConfig`."""
        return {fact.name: fact.value for fact in self.shape}


_PLAIN_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_CNETS, _MAIN, _DS = "eagle/traineagle3/cnets.py", "eagle/traineagle3/main.py", "eagle/traineagle3/ds_config.json"
_FORGE, _FORGE_SCHEMA = "specforge/algorithms/eagle3/model.py", "specforge/config/schema.py"
_CORE, _SCHEMA = "speculators/models/eagle3/core.py", "speculators/train/config/schema.py"

SAFEAI = Preset("safeai", "SafeAILab/EAGLE, 2026-02", (
    Fact("ttt_steps", 7, f"{_CNETS} Model.length"),
    Fact("decay", 0.8, f"{_MAIN} ploss_weight"),
    Fact("loss", "soft-ce", f"{_CNETS} Model.forward: plogp"),
    Fact("normaliser", "positions", f"{_CNETS} Model.forward: sum over the vocabulary, mean over batch and rows"),
    Fact("outside", "masked", f"{_CNETS} Model.forward: t2d[target_max_token] in position_mask"),
    Fact("alignment", "same", f"{_CNETS} dataprepare: loss_mask is not shifted, target and input_ids are"),
    Fact("past_end", True, f"{_CNETS} padding: zeros for the logits after the last, whose first choice is token 0"),
    Fact("first_position", 0, f"{_CNETS} Model.forward: position_ids from 0"),
    Fact("noise", 0.0, "none in eagle/traineagle3 (eagle/train/main.py, of EAGLE-1 and 2, adds it)"),
    Fact("optimizer", "adamw", _DS), Fact("learning_rate", 5e-5, f"{_DS} warmup_max_lr"),
    Fact("head_rate", 1.0, f"{_CNETS} Model: lm_head is a parameter like others"),
    Fact("betas", (0.9, 0.95), _DS), Fact("weight_decay", 0.0, _DS), Fact("clip", 0.5, f"{_DS} gradient_clipping"),
    Fact("schedule", "linear", f"{_DS} WarmupDecayLR"), Fact("final_rate", 0.0, f"{_DS} WarmupDecayLR"),
    Fact("warmup_share", 0.015, f"{_DS} 12000 of 800000 steps"), Fact("epochs", 40, f"{_MAIN} num_epochs"),
    Fact("scaled", False, f"{_CNETS} Model.fc is torch's Linear on the states as they are"),
), (
    *(Fact(name, False, f"{_CNETS} Model") for name in _PLAIN_NORMS),
    Fact("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0},
         f"{_CNETS} LlamaRotaryEmbedding: its default base, whatever the configuration says"),
), ("one sequence a batch and two batches a step, in float16 with loss scaling", "warmup along a logarithm (DeepSpeed's default)",
    "a random head", "its chat format and system prompt"))

SPECFORGE = Preset("specforge", "0.2.0", (
    Fact("ttt_steps", 7, f"{_FORGE_SCHEMA} ttt_length"),
    Fact("decay", 0.8, "specforge/training/strategies/base.py ploss_decay"),
    Fact("loss", "soft-ce", "specforge/core/loss.py LogSoftmaxLoss"),
    Fact("normaliser", "positions", "specforge/core/loss.py LogSoftmaxLoss: mean over batch and rows"),
    Fact("outside", "masked", f"{_FORGE} _compute_target_p: t2d[target_token_ids] in position_mask"),
    Fact("alignment", "same", "specforge/modeling/target/target_head.py preprocess: loss_mask is not shifted"),
    Fact("past_end", False, "specforge/algorithms/eagle3/data.py normalize_offline_sample: the last token's mask is set to 0"),
    Fact("first_position", 0, f"{_FORGE} _prepare_position_ids"),
    Fact("noise", 0.0, "none in specforge/algorithms/eagle3"),
    Fact("optimizer", "adamw", "specforge/optimizer.py BF16Optimizer"),
    Fact("learning_rate", 1e-4, f"{_FORGE_SCHEMA} learning_rate"),
    Fact("head_rate", 1.0, "specforge/optimizer.py: one group of all parameters"),
    Fact("betas", (0.9, 0.999), "specforge/optimizer.py: torch's default"),
    Fact("weight_decay", 0.0, "specforge/optimizer.py BF16Optimizer"), Fact("clip", 0.5, f"{_FORGE_SCHEMA} max_grad_norm"),
    Fact("schedule", "cosine", f"{_FORGE_SCHEMA} lr_scheduler"), Fact("final_rate", 0.0, "specforge/lr_scheduler.py eta_min"),
    Fact("warmup_share", 0.015, f"{_FORGE_SCHEMA} warmup_ratio"), Fact("epochs", 1, f"{_FORGE_SCHEMA} num_epochs"),
    Fact("scaled", False, "specforge/modeling/draft/llama3_eagle.py fc"),
), tuple(Fact(name, False, "specforge/modeling/draft/llama3_eagle.py: off by default, or not there") for name in _PLAIN_NORMS),
    ("one sequence a batch, weights in bfloat16 under float32 masters", "the rope of its templates", "a random head"))

SPECULATORS = Preset("speculators", "0.9.0", (
    Fact("ttt_steps", 3, f"{_SCHEMA} ttt_steps"), Fact("decay", 1.0, f"{_SCHEMA} ttt_step_loss_decay"),
    Fact("loss", "kl", f"{_SCHEMA} loss_fn"),
    Fact("normaliser", "rows-eps", "speculators/losses/utils.py loss_function: sum of the mask + 1e-5"),
    Fact("outside", "kept", f"{_CORE} forward: targets over the draft vocabulary, masked by loss_mask alone"),
    Fact("alignment", "next", "speculators/models/eagle3/data.py shift_batch: (x1, g0, y1, l1)"),
    Fact("past_end", False, "speculators/models/eagle3/metrics.py align_for_step"),
    Fact("first_position", 1, "speculators/models/eagle3/data.py shift_batch: position_ids now start at 1"),
    Fact("window_moves", False, "speculators/models/eagle3/attention.py extend_mask_for_draft_tokens"),
    Fact("noise", 0.0, "none in speculators/train of this release"),
    Fact("optimizer", "muon", f"{_SCHEMA} optimizer"), Fact("learning_rate", 1e-3, f"{_SCHEMA} lr"),
    Fact("head_rate", 0.0, "speculators/model.py DraftVocabMixin: lm_head is the verifier's and frozen"),
    Fact("betas", (0.9, 0.999), "speculators/train/optimizers.py: torch's default"),
    Fact("weight_decay", 0.01, f"{_SCHEMA} weight_decay"), Fact("matrix_decay", 0.1, f"{_SCHEMA} muon_weight_decay"),
    Fact("clip", 1.0, "speculators/train/trainer.py clip_grad_norm_"), Fact("schedule", "linear", f"{_SCHEMA} scheduler_type"),
    Fact("final_rate", 0.0, "speculators/train/trainer.py get_linear_schedule_with_warmup"),
    Fact("warmup_share", 0.01, "speculators/train/trainer.py _resolve_scheduler_steps"),
    Fact("epochs", 20, f"{_SCHEMA} epochs"),
    Fact("scaled", False, f"{_CORE} fc"),
), (
    Fact("norm_before_residual", True, f"{_SCHEMA} norm_before_residual"),
    Fact("norm_before_fc", True, f"{_SCHEMA} norm_before_fc: true for eagle3"),
    Fact("fc_norm", False, f"{_SCHEMA} fc_norm"), Fact("norm_output", True, f"{_SCHEMA} norm_output: true for eagle3"),
    Fact("sliding_window", 2048, f"{_SCHEMA} sliding_window"),
), ("sequences packed into one of 8192 tokens, where the last rows of one see the first tokens of the next at later steps",
    "bfloat16 (--precision bfloat16)", "norm weights decay too"),
    target_rope=f"{_CORE} rotary_emb of the verifier's configuration")

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (SAFEAI, SPECFORGE, SPECULATORS)}
