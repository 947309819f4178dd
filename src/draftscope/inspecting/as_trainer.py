"""A training file as a named trainer reads it: which entry goes to which slot, which is the teacher, what it does not notice."""

from __future__ import annotations

from draftscope.errors import UsageError
from draftscope.inspecting.meaning import READABLE, is_normed
from draftscope.inspecting.measure import Pass
from draftscope.inspecting.report import AsTrainer, Entry, Feed
from draftscope.inspecting.suspicions import alone, layer_number, says_embedding
from draftscope.states import plain, speculators_v1

SPECULATORS = ("0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
TORCH_FILES = ("0.3", "0.4", "0.5", "0.6", "0.7")
"""`standardize_data_v1` in `speculators/train/data.py` of the published wheels; gone in 0.8.0."""
SAFETENSORS = ("0.5", "0.6", "0.7", "0.8", "0.9")
"""`hs_{i}.safetensors`, read beside an Arrow data set; same file, from 0.5.0."""
UNNORMED_TEACHER = ("0.3",)
"""`verifier_lm_head(verifier_last_hidden_states)` in `models/eagle3/core.py`; 0.4.0 puts `verifier_norm` before it."""
KNOWN = ("speculators", *(f"speculators@{version}" for version in SPECULATORS))


def check_name(name: str) -> str:
    """The trainer's name, if it is known.

    Raises:
        UsageError: it is not; lists those that are.
    """
    trainer, _, version = name.partition("@")
    if trainer != "speculators" or (version and _minor(version) not in SPECULATORS):
        raise UsageError(f"no trainer `{name}`", remedy=f"Known: {', '.join(KNOWN)}")
    return name


def read_as(name: str, found: Pass) -> AsTrainer:
    """What the trainer makes of training data that was measured.

    All entries but the last are concatenated in order for `fc`; the last becomes `verifier_last_hidden_states`, to which the
    trainer applies the final norm, then the head.

    Raises:
        UsageError: an unknown trainer, or the path holds no training data.
    """
    version = _minor(check_name(name).partition("@")[2])
    report = found.report
    if report.what != "training data":
        raise UsageError(f"{report.path} is a {report.what}, which no trainer reads", remedy="--as takes training data")
    entries = report.entries
    torch_files = report.format == speculators_v1.NAME
    result = AsTrainer(trainer=name, path=report.path, reads=(
        "hidden_states[:-1] concatenated in order for fc; hidden_states[-1] as verifier_last_hidden_states"))
    if version and torch_files and version not in TORCH_FILES:
        result.refuses.append("this version no longer reads torch files (data_*.pt)")
    if version and report.format == plain.NAME and version not in SAFETENSORS:
        result.refuses.append("this version reads torch files (data_*.pt), not hs_*.safetensors")
    for number, entry in enumerate(entries):
        teacher = number == len(entries) - 1
        feed = Feed(entry=number, label=entry.label, inferred=entry.inferred,
                    goes_to="teacher (verifier_last_hidden_states)" if teacher else f"slot {number}")
        feed.warns = _teacher(entry, entries, version) if teacher else _slot(entry)
        result.feeds.append(feed)
    result.silently = _silently(found, torch_files)
    return result


def _teacher(entry: Entry, entries: list[Entry], version: str) -> list[str]:
    warns = []
    placed, text = entry.placed, max(entry.text_pre or 0.0, entry.text_post or 0.0)
    if placed is not None and placed.boundary is not None and placed.boundary != len(placed.errors) - 1:
        warns.append(f"is {entry.inferred}, not the last state: the teacher's logits are the head over a middle layer")
    elif placed is None and entry.text_pre is not None and text < READABLE:
        warns.append(f"the target's head gives {100 * text:.0f} % of the text from it: no last state, or not this target's text")
    elif alone(entry):
        warns.append("depends on the token alone: a teacher that repeats the input")
    elif entry.rank is not None and entry.rank < sum(e.rank is not None for e in entries) and not is_normed(entry):
        warns.append("is not the deepest entry by norm and token share: perhaps no last state, or one after the final norm")
    number = layer_number(entry.label)
    others = [n for e in entries[:-1] if (n := layer_number(e.label)) is not None]
    if number is not None and others and number <= max(others):
        warns.append(f"is labelled “{entry.label}”, not the deepest label: were the labels right, no last state would be there")
    if (placed is not None and placed.norm == "post") or (placed is None and is_normed(entry)):
        if version not in UNNORMED_TEACHER:
            warns.append("was stored after the final norm: the trainer applies that norm once more")
    elif version in UNNORMED_TEACHER and (placed is not None or entry.text_pre is not None):
        warns.append("is before the final norm, and this version feeds it to the head as it is")
    return warns


def _slot(entry: Entry) -> list[str]:
    warns = []
    if says_embedding(entry.label) and alone(entry) is False:
        warns.append(f"labelled “{entry.label}”, but is no embedding; the trainer does not read labels")
    if alone(entry) and not says_embedding(entry.label):
        warns.append("holds the embedding")
    return warns


def _silently(found: Pass, torch_files: bool) -> list[str]:
    report = found.report
    said = []
    slots = len(report.entries) - 1
    if slots != 3:
        said.append(f"{slots} slots: fc gets {slots} times the width where a draft of three slots expects 3")
    bad = max((entry.nonfinite.items for entry in report.entries), default=0)
    if bad:
        said.append(f"{bad} samples with NaN or Inf: dropped or trained on, without an error")
    if any(dtype in ("float32", "float64") for entry in report.entries for dtype in entry.dtypes):
        said.append("states are cast to bfloat16 on the way into the model")
    if not torch_files:
        said.append("the loss mask is taken from the data set beside the files, not from the files")
    elif report.masked < report.items:
        said.append("samples without loss_mask: this reader needs one")
    if report.masked and report.empty_masks:
        said.append(f"{report.empty_masks} samples train on nothing")
    said.append("labels are not read: the order in the file alone decides")
    return said


def _minor(version: str) -> str:
    return ".".join(version.removeprefix("v").split(".")[:2])
