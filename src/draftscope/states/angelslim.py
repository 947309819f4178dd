"""AngelSlim's offline data: `rows_*/data_{i}.ckpt` with `hidden_states` [1, S, 3H] and `target_hiddens` [1, S, H].

The slots are called `hidden_states` here; the last state is after the final norm, unless the vLLM back end found no norm to
hook and fell back with a warning in its log (`compressor/speculative/train/models/target/target_model_wrapper.py`, 0.5.0).
"""

from __future__ import annotations

from draftscope.states.features import Layout
from draftscope.states.torchfile import TORCH_FILES
from draftscope.states.torchsource import PairFormat

NAME = "angelslim"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
OVER = frozenset({"speculators-v1"})
LAYOUT = Layout(features="hidden_states", last="target_hiddens", norm="post")
_FORMAT = PairFormat(NAME, LAYOUT)
fits, open, read_sample = _FORMAT.fits, _FORMAT.open, _FORMAT.read_sample
