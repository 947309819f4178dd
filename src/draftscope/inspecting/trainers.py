"""Trainers as facts: which files each version reads, which tensor goes where, and what it does to them without a word.

Every fact names the file of the released package (or of the repository, where no release holds it) in which it was read.
`when` is the name of a condition that `as_trainer` evaluates on the data at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from draftscope.states import (
    angelslim,
    modelopt,
    plain,
    specforge,
    speculators,
    speculators_v0,
    speculators_v1,
    torchspec,
    trtllm,
)

NormApplied = Literal["applied", "not applied", "by marker", "by setting"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a trainer does.

    Attributes:
        says: one clause; `{...}` is filled from the figures at hand.
        source: package file, and version where it was read.
        when: on which data it matters; `always` = on all.
        versions: minor versions for which it holds; () = all.
    """

    says: str
    source: str
    when: str = "always"
    versions: tuple[str, ...] = ()

    def holds(self, version: str) -> bool:
        return not self.versions or not version or version in self.versions


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer.

    Attributes:
        versions: minor versions read; () = a repository without releases that hold code.
        reads: formats and the versions that read each; () = all of `versions`.
        slots, teacher: which tensor becomes the draft's features and which the teacher's last state.
        teacher_name: what the trainer calls the latter.
        norm: whether the final norm is applied to the teacher's state before the head, by version (`""` = any other).
        alignment: mask, shift and positions.
        silently: what it does or leaves undone without an error.
    """

    name: str
    versions: tuple[str, ...]
    reads: Mapping[str, tuple[str, ...]]
    slots: Fact
    teacher: Fact
    teacher_name: str
    norm: Mapping[str, tuple[NormApplied, str]]
    alignment: tuple[Fact, ...]
    silently: tuple[Fact, ...]

    def norm_of(self, version: str) -> tuple[NormApplied, str]:
        return self.norm.get(version, self.norm[""])


SHIFT = "row t gets the feature of token t, the embedding of token t+1, and is taught the distribution at token t+1"
THREE = "{slots} slots: fc gets {slots} times the width where a draft of three slots expects 3"
LABELS = "labels are not read: the order in the file alone decides"
TEXT_ORDER = "files are taken in the order of their names as text ({first} before {second}), not by number"

SAME = "row t is supervised where the mask of token t is 1"
NEXT = "row t is supervised where the mask of token t+1 is 1"
BAD = "{bad} samples with NaN or Inf are trained on: nothing looks for them"
EMPTY = "{empty} samples train on nothing"

_OPT_DATA = "modelopt/torch/speculative/eagle/utils.py, 0.47.0"
_OPT_EAGLE = "modelopt/torch/speculative/plugins/hf_eagle.py, 0.47.0"
_OPT_NORM = "modelopt/torch/speculative/plugins/modeling_final_norm.py, 0.47.0"
_SLIM_TRAINER = "compressor/speculative/train/trainer/offline_eagle3_trainer.py, 0.5.0"
_SLIM_DATA = "compressor/speculative/train/data/dataset_builder/offline_dataset_builder.py, 0.5.0"
_SPEC_TRAINER = "torchspec/training/eagle3_trainer.py, repository of 2026"
_NEW = ("0.5", "0.6", "0.7", "0.8", "0.9")

SPECULATORS = Trainer(
    name="speculators",
    versions=("0.3", "0.4", *_NEW),
    reads={
        plain.NAME: _NEW, speculators.NAME: _NEW, speculators_v1.NAME: ("0.3", "0.4", "0.5", "0.6", "0.7"),
        speculators_v0.NAME: ("0.3",),
    },
    slots=Fact("hidden_states[:-1] concatenated in order for fc", "train/data.py, 0.9.0 (ArrowDataset), 0.3.0"),
    teacher=Fact("hidden_states[-1] as verifier_last_hidden_states", "train/data.py, 0.9.0"),
    teacher_name="verifier_last_hidden_states",
    norm={"": ("applied", "models/eagle3/core.py, 0.4.0 and 0.9.0: verifier_norm before verifier_lm_head"),
          "0.3": ("not applied", "models/eagle3/core.py, 0.3.0: verifier_lm_head on the state as it is")},
    alignment=(
        Fact(NEXT, "models/eagle3/data.py, 0.9.0 (shift_batch)"),
        Fact(SHIFT, "models/eagle3/data.py, 0.9.0 (shift_batch)"),
        Fact("positions begin with 1, those of a server with 0", "models/eagle3/data.py, 0.9.0 (shift_batch)"),
    ),
    silently=(
        Fact(THREE, "train/data.py, 0.9.0", "slots"),
        Fact("{bad} samples with NaN or Inf: states that lie on disk are not checked, so they are trained on",
             "train/data.py, 0.9.0 (_get_raw_data checks generated states only)", "bad"),
        Fact("states are cast to bfloat16 on the way into the model", "train/data.py, 0.9.0 (CollateFn)", "wide dtype"),
        Fact("states in eight bits are multiplied by their scales with the fp8 back end alone; the file back end takes them bare",
             "hs_connectors/transfer.py, 0.9.0 (FileTransfer, FP8Transfer)", "eight bits"),
        Fact("the loss mask is taken from the data set beside the files, not from the files", "train/data.py, 0.9.0",
             "safetensors"),
        Fact("a file whose token ids are not those of its row is dropped with a warning", "train/data.py, 0.9.0", "safetensors"),
        Fact("samples without loss_mask: this reader needs one", "train/data.py, 0.3.0", "torch unmasked"),
        Fact(EMPTY, "models/eagle3/core.py, 0.9.0", "empty masks"),
        Fact(LABELS, "train/data.py, 0.9.0"),
    ),
)

SPECFORGE = Trainer(
    name="specforge",
    versions=("0.2",),
    reads={specforge.NAME: ()},
    slots=Fact("the file's aux_hidden_state, called hidden_state from there on, for fc", "algorithms/eagle3/data.py, 0.2.0"),
    teacher=Fact("the file's hidden_state, called target from there on", "algorithms/eagle3/data.py, 0.2.0"),
    teacher_name="target",
    norm={"": ("not applied", "modeling/target/target_head.py, 0.2.0: the head alone")},
    alignment=(
        Fact(f"{SAME}; the last token's is set to 0", "algorithms/eagle3/data.py, 0.2.0"),
        Fact(SHIFT, "modeling/target/target_head.py, 0.2.0 (preprocess shifts ids and target, not the mask)"),
    ),
    silently=(
        Fact(THREE, "algorithms/eagle3/model.py, 0.2.0", "slots"),
        Fact(BAD, "runtime/data_plane/offline_reader.py, 0.2.0",
             "bad"),
        Fact("the teacher's head is bfloat16, whatever the target is stored in", "modeling/target/target_head.py, 0.2.0"),
        Fact(TEXT_ORDER, "runtime/data_plane/offline_reader.py, 0.2.0 (list_feature_files)", "text order"),
        Fact("files are unpickled whole, so code in one would run",
             "runtime/data_plane/feature_store.py, 0.2.0 (load_feature_file)"),
        Fact(EMPTY, "algorithms/eagle3/model.py, 0.2.0", "empty masks"),
        Fact("samples without loss_mask: this reader needs one", "runtime/data_plane/offline_reader.py, 0.2.0", "unmasked"),
        Fact("longer samples are cut to max_length", "algorithms/eagle3/data.py, 0.2.0"),
    ),
)

MODELOPT = Trainer(
    name="modelopt",
    versions=("0.47",),
    reads={modelopt.NAME: ()},
    slots=Fact("aux_hidden_states for fc", _OPT_DATA),
    teacher=Fact("hidden_states as base_model_hidden_states", _OPT_DATA),
    teacher_name="base_model_hidden_states",
    norm={"": ("by marker", f"{_OPT_NORM}: only where hidden_states_prenorm is true")},
    alignment=(
        Fact(NEXT, _OPT_EAGLE),
        Fact(SHIFT, f"{_OPT_EAGLE} (logits against targets one token later)"),
    ),
    silently=(
        Fact(THREE, _OPT_EAGLE, "slots"),
        Fact("the files' loss masks are ignored, every token is taught, unless answer_only_loss is set",
             _OPT_DATA),
        Fact("answer_only_loss stops at samples without loss_mask", _OPT_DATA, "unmasked"),
        Fact(BAD, _OPT_DATA,
             "bad"),
        Fact("samples are padded or cut to one length", f"{_OPT_DATA} (EagleOfflineDataCollator)"),
    ),
)

TORCHSPEC = Trainer(
    name="torchspec",
    versions=(),
    reads={torchspec.NAME: ()},
    slots=Fact("hidden_states for fc", _SPEC_TRAINER),
    teacher=Fact("last_hidden_states, through the target's head", _SPEC_TRAINER),
    teacher_name="last_hidden_states",
    norm={"": ("by setting", f"{_SPEC_TRAINER}: where last_hidden_states_prenorm is set (unasked for vLLM alone)")},
    alignment=(
        Fact(SAME, f"{_SPEC_TRAINER} (_forward shifts ids and target)"),
        Fact(SHIFT, f"{_SPEC_TRAINER} (_forward)"),
    ),
    silently=(
        Fact("debug dumps are written and never read back: this is what the batch was, not what a run would load",
             "torchspec/utils/train_dump.py", "dump"),
        Fact(THREE, "torchspec/models/draft/llama3_eagle.py", "slots"),
        Fact("batches are padded on the right to a multiple of 256 tokens", "torchspec/data/utils.py (DataCollatorWithPadding)"),
        Fact(BAD, "torchspec/data/utils.py", "bad"),
        Fact(EMPTY, "torchspec/models/eagle3.py", "empty masks"),
    ),
)

ANGELSLIM = Trainer(
    name="angelslim",
    versions=("0.5",),
    reads={angelslim.NAME: ()},
    slots=Fact("hidden_states for fc", _SLIM_TRAINER),
    teacher=Fact("target_hiddens, through the target's head", _SLIM_TRAINER),
    teacher_name="target_hiddens",
    norm={"": ("not applied", "compressor/speculative/train/models/target/target_head.py, 0.5.0: the head alone")},
    alignment=(
        Fact(SAME,
             f"{_SLIM_TRAINER} (ids and logits are shifted, the mask is not)"),
        Fact(SHIFT, _SLIM_TRAINER),
    ),
    silently=(
        Fact(THREE, "compressor/speculative/train/models/draft/llama_eagle3.py, 0.5.0", "slots"),
        Fact("files that do not load are replaced by others with a warning",
             _SLIM_DATA),
        Fact(TEXT_ORDER, _SLIM_DATA, "text order"),
        Fact(BAD,
             _SLIM_DATA, "bad"),
    ),
)

TRAINERS = {trainer.name: trainer for trainer in (SPECULATORS, SPECFORGE, MODELOPT, TORCHSPEC, ANGELSLIM)}
ELSEWHERE = {
    trtllm.NAME: "raw dumps of TensorRT-LLM are turned into ModelOpt's files first",
}
"""Formats that no trainer reads, and what is done with them."""
