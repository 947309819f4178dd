"""What each engine makes of a draft checkpoint: facts as data, each with its source, and what follows from them.

    effective(checkpoint, "sglang@0.5.23", 36)   the boundaries, settings and tensors in effect
    config_for("vllm@0.32", (2, 18, 33), 36)     the keys that make it capture these boundaries
"""

from draftscope.consumers.effective import CONSUMERS, Effective, config_for, consumer, effective

__all__ = ["CONSUMERS", "Effective", "config_for", "consumer", "effective"]
