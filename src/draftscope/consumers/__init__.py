"""What each engine and trainer makes of a draft checkpoint: facts as data, each with its source, and what follows from them.

    effective(checkpoint, "sglang@0.5.23", 36)   the boundaries, settings and tensors in effect
    config_for("vllm@0.32", (2, 18, 33), 36)     the keys that make it capture these boundaries

A name is `NAME[@VERSION][:VARIANT]`: `vllm` (the newest version known), `sglang@0.5.14`, `vllm@0.33:v1` (a model runner),
`sglang@0.5.14:eagle` (started with `--speculative-algorithm EAGLE`). A version that is not known means the nearest lower one.
"""

from draftscope.consumers.effective import Effective, config_for, effective, setting_for
from draftscope.consumers.known import CONSUMERS, Asked, ask, consumer, everybody, names
from draftscope.consumers.points import Point

__all__ = ["CONSUMERS", "Asked", "Effective", "Point", "ask", "config_for", "consumer", "effective", "everybody", "names",
           "setting_for"]
