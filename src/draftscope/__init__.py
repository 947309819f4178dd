"""draftscope finds out why a draft model's tokens get rejected.

    source = draftscope.open("capture/")                  samples or traces, lazily
    found = draftscope.replay(["draft/"], "capture/")      acceptance offline, as `draftscope replay` finds it
    print(found.json_text())
    draftscope.diagnose(train="states/", serve="capture/", draft="draft/", target="target/")

Names are imported when they are used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "open": "draftscope.states.opening:open_source",
    "scan": "draftscope.scan",
    "compare": "draftscope.compare",
    "diagnose": "draftscope.diagnose",
    "replay": "draftscope.counterfactual:counterfactuals",
    "DraftscopeError": "draftscope.errors:DraftscopeError",
    "UsageError": "draftscope.errors:UsageError",
    "Diagnosis": "draftscope.findings:Diagnosis",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'draftscope' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    imported = importlib.import_module(module)
    value = getattr(imported, attribute) if attribute else imported  # a room that is also a function
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
