"""Which parameter a stored name reaches in a consumer, if any."""

from __future__ import annotations

import re

from draftscope.consumers.facts import Consumer, Naming

_MAPS = ("d2t", "t2d")
_OUTSIDE = re.compile(r"(fc|norm|embed_tokens|input_norm|fc_norm\.\d+)\.(weight|bias)$")
_INSIDE = re.compile(r"(midlayer|layers\.\d+)\.[a-z]")


def naming_of(known: Consumer, latent: bool) -> Naming:
    """The rules for a draft with multi-head latent attention, or without."""
    return known.latent_naming if latent and known.latent_naming is not None else known.naming


def reaches(naming: Naming, own: str) -> str | None:
    """The native name of the parameter that a stored name is loaded into; None = it has no place."""
    name = own
    for old, new in naming.renames:
        name = name.replace(old, new)
    if naming.everywhere:
        name = name.removeprefix(naming.prefix)
    for mapped in _MAPS:
        if (name == mapped) if naming.exact else (mapped in name):
            return mapped
    if name.startswith("lm_head."):
        return name
    if naming.prefix and name.startswith(naming.prefix):
        name = name[len(naming.prefix):]
    if _OUTSIDE.match(name):
        return name
    if not _INSIDE.match(name):
        return None
    if naming.layer:
        if not name.startswith(naming.layer):
            return None
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
    return name if name.startswith("midlayer.") else None
