"""Training files of the first speculators: `*.pt` with `hidden_state` [S, 3H] (the slots) and `target` [S, H].

`standardize_data_v0` in `train/data.py` of 0.3.0, which calls `target` the verifier's last state and feeds it to the head
as it is; gone in 0.4.0. SpecForge uses the same two names, in memory only.
"""

from __future__ import annotations

from draftscope.states.features import Layout
from draftscope.states.torchfile import TORCH_FILES
from draftscope.states.torchsource import PairFormat

NAME = "speculators-v0"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
LAYOUT = Layout(features="hidden_state", last="target")
_FORMAT = PairFormat(NAME, LAYOUT)
fits, open, read_sample = _FORMAT.fits, _FORMAT.open, _FORMAT.read_sample
