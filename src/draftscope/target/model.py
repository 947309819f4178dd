"""The target: loaded with transformers, run with or without a cache, its states captured where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftscope.boundaries import Boundary
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.tensorfile import read_json
from draftscope.target.cache import Branches, RaggedCache
from draftscope.target.families import family_of, lacks_cache
from draftscope.target.parts import TargetParts, assemble, read_config, tensor_files, text_prefix
from draftscope.target.ranks import MLPS, shares
from draftscope.target.sizes import check_model, check_sizes, read_shapes


@dataclass(slots=True)
class Forward:
    """What a forward pass of [R, W] tokens hands back, in the target's dtype.

    Attributes:
        taps: [R, W, len(taps), Ht] in the order asked for.
        last: [R, W, Ht], the last state before the final norm; post: after it.
    """

    taps: Tensor
    last: Tensor
    post: Tensor


@dataclass(slots=True)
class Run:
    """The states [R, W, Ht] that a pass went through, by boundary index, and its output after the final norm."""

    streams: dict[int, Tensor]
    partials: dict[int, Tensor]
    post: Tensor


class Target:
    """A causal language model whose residual stream can be tapped at every boundary.

    Args:
        model: transformers model, in eval mode, Llama-like or of a family in `target.families`.
        folder: where it was loaded from (tokenizer, messages).

    Attributes:
        partials: whether the stream between attention and MLP can be had; `load_target` finds out.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.config: Any = model.config.get_text_config()
        self.family = family_of(self.config.model_type)
        self._body = _body(model, folder)
        self._layers: list[nn.Module] = list(self._body.layers)
        self._norm: nn.Module = self._body.norm
        self.layers = len(self._layers)
        self.width = int(self.config.hidden_size)
        embedding, head = self._body.embed_tokens.weight.detach(), model.get_output_embeddings().weight.detach()
        self.parts: TargetParts = assemble(self.config.to_dict(), embedding, self._body.norm.weight.detach(), head, folder)
        self.partials = hasattr(self._layers[0], self.family.mlp_input)
        self.head: Callable[[Tensor], Tensor] | None = None  # a faster product with the head (`target.packed`)

    @property
    def device(self) -> torch.device:
        return self.parts.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.embedding.dtype

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer (transformers), read when first asked for."""
        return load_tokenizer(self.folder)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the generation config's, the config's and the tokenizer's."""
        found: set[int] = set()
        for config in (getattr(self.model, "generation_config", None), self.config):
            ids = getattr(config, "eos_token_id", None)
            found |= set(ids) if isinstance(ids, list | tuple) else {ids} if ids is not None else set()
        if (self.folder / "tokenizer.json").is_file() and self.tokenizer.eos_token_id is not None:
            found.add(int(self.tokenizer.eos_token_id))
        return frozenset(found)

    def logits(self, post: Tensor) -> Tensor:
        """Logits [..., V] of states [..., Ht] after the final norm, in float32."""
        return self.parts.logits(post, self.head)

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        """An empty cache for `rows` sequences of up to `capacity` tokens.

        Raises:
            DraftscopeError: a target whose layers keep more than keys and values.
        """
        if why := lacks_cache(self.config.to_dict()):
            raise DraftscopeError(f"a target of model_type {self.config.model_type!r} can't generate here: {why}",
                                  where=str(self.folder), remedy="Generate in the engine that serves it, and record states there")
        return RaggedCache(self.layers, rows, capacity)

    def forward(
        self, ids: Tensor, taps: Sequence[Boundary], *, cache: RaggedCache | None = None, rows: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Forward:
        """Run [R, W] tokens and capture the taps; no other state is kept.

        Without a cache the rows start at position 0 and are causal; what is padded on their right never reaches a real
        token. With one they continue its rows (`rows`: which, None = all) as chains, or as `branches` of a tree; the caller
        commits how many tokens to keep.
        No gradient is recorded.

        Raises:
            UsageError: a tap that this target does not have.
        """
        streams, partials = self._needed(taps)
        run = self.run(ids, streams, partials, cache=cache, rows=rows, branches=branches)
        last = run.streams[self.layers]
        found = [self._first_share(tap, run) if tap.ranks else _pick(tap, run) for tap in taps]
        return Forward(torch.stack(found, -2) if found else last.new_empty(*last.shape[:2], 0, self.width), last, run.post)

    def run(
        self, ids: Tensor, streams: set[int], partials: set[int], *, cache: RaggedCache | None = None, rows: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Run:
        """`forward` for boundary indices: the states themselves, nothing stacked or copied."""
        with torch.no_grad(), _capture(self._layers, self._norm, self.family.mlp_input, streams, partials) as (held, between):
            arguments: dict[str, Any] = {"use_cache": False}
            if cache is not None:
                positions, mask = cache.begin(ids.shape[1], rows, branches)
                arguments = {"position_ids": positions.to(self.device), "attention_mask": self._masks(cache, mask, positions),
                             "cache": cache, "use_cache": True}
            post: Tensor = self._body(ids.to(self.device), **arguments).last_hidden_state
        return Run(held, between, post)

    def shares(self, boundary: int, partial: Tensor, ranks: int) -> Tensor | None:
        """`ranks.shares` of layer `boundary` - 1, of the stream between its attention and MLP [..., Ht]."""
        return shares(self._layers[boundary - 1], self.family.mlp_input, partial, ranks)

    def adds_shares(self, ranks: int) -> bool:
        """Whether a layer's output is the stream between attention and MLP plus the parts of so many ranks, and no more."""
        if not self.partials:
            return False
        run = self.run(torch.arange(4)[None] % self.parts.vocab, {1}, {1})
        each = self.shares(1, run.partials[1], ranks)
        if each is None:
            return False
        added = (run.streams[1] - run.partials[1]).float()
        return bool((each.sum(-2).float() - added).norm() < 0.1 * added.norm())

    def _first_share(self, tap: Boundary, run: Run) -> Tensor:
        partial = run.partials[tap.index]
        found = self.shares(tap.index, partial, tap.ranks)
        if found is None:
            raise UsageError(f"the MLP of layer {tap.index - 1} is not one that {tap.ranks} ranks share here",
                             remedy="Take whole streams, or another number of ranks")
        return partial + found[..., 0, :]

    def check_taps(self, taps: Sequence[Boundary]) -> None:
        """Raise UsageError if a tap is not one of the target's."""
        self._needed(taps)

    def _needed(self, taps: Sequence[Boundary]) -> tuple[set[int], set[int]]:
        streams, partials = _needed(taps, self.layers)
        if partials and not self.partials:
            raise UsageError(f"a target of model_type {self.config.model_type!r} has no stream between attention and MLP that "
                             "can be told", remedy="Take whole streams and branches")
        return streams, partials

    def check_ids(self, name: str, ids: Tensor) -> None:
        """Raise DraftscopeError if a token id is not one of the target's."""
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.parts.embedding.shape[0]):
            raise DraftscopeError(
                f"token ids {int(ids.min())}..{int(ids.max())}, but the target knows 0..{len(self.parts.embedding) - 1}",
                where=name, remedy="The tokens come from another model's tokenizer",
            )

    def _masks(self, cache: RaggedCache, mask: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """The cache's boolean mask as this family's attention takes it: windows applied, additive for eager attention."""
        window = getattr(self.config, "sliding_window", None) if self.family.sliding != "none" else None
        mask = mask.to(self.device)
        narrow = mask
        if window is not None:
            narrow = mask & (cache.distances(positions) < window).to(self.device)
        if self.config._attn_implementation == "eager":
            lowest = torch.finfo(self.dtype).min
            mask, narrow = ((~m).to(self.dtype) * lowest for m in (mask, narrow))
        if self.family.sliding == "typed":
            return {"full_attention": mask, "sliding_attention": narrow}
        return narrow


def load_target(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """Load a target from a folder with config.json and safetensors, without touching the network.

    Raises:
        DraftscopeError: the folder or a tensor is missing or unreadable, the architecture is not one that transformers
            runs natively, config and files contradict each other (told from the headers, before anything is allocated), or
            its embedding and final norm do not do what its family is known for.
        UsageError: no such device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_device(device)
    config = read_config(folder)
    names = tensor_files(folder)
    prefix = text_prefix(names, folder)
    absent = sorted({file.name for file in names.values() if not file.is_file()})
    if absent:
        raise DraftscopeError(f"weights are missing: {', '.join(absent[:4])}", where=str(folder),
                              remedy="This command runs the target and needs all of its weights")
    if not any("layers." in name for name in names):
        raise DraftscopeError("holds the target's parts but not its layers", where=str(folder),
                              remedy="This command runs the target and needs all of its weights")
    raw, shapes = read_json(folder / "config.json"), read_shapes(names)
    check_sizes(raw, config, shapes, prefix, folder)
    try:
        with quiet_transformers():
            described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                hollow = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
            check_model(hollow, shapes, folder, quantised="quantization_config" in raw or "quantization_config" in config)
            del hollow
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True,
                trust_remote_code=False,
            )
    except DraftscopeError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise DraftscopeError("does not fit into memory", where=str(folder),
                                  remedy="Take a machine with more memory, or bfloat16") from None
        raise DraftscopeError(
            f"transformers cannot load this target ({_first_line(error)})", where=str(folder),
            remedy=f"model_type is {config['model_type']!r}: its architecture must be one that transformers runs natively",
        ) from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise DraftscopeError(f"tensor {', '.join(lacking[:3])} is missing ({len(lacking)} in all)", where=str(folder),
                              remedy="Copy all shards from the target's model folder")
    target = Target(model.to(device).eval(), folder)
    _verify(target)
    return target


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch says so with a RuntimeError on the CPU."""
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text or "out of memory" in text


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used here ({_first_line(error)})", remedy="cpu always works") from None


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as an error that names the file where it cannot be had."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DraftscopeError(f"its tokenizer cannot be read ({_first_line(error)})", where=str(folder),
                              remedy="Copy tokenizer.json and tokenizer_config.json from the target's model folder") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or warnings of transformers on the user's terminal while this lasts."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _body(model: Any, folder: Path) -> Any:
    body = model.get_decoder()
    lacking = [name for name in ("layers", "norm", "embed_tokens") if not hasattr(body, name)]
    if lacking or model.get_output_embeddings() is None:
        raise DraftscopeError(f"{type(model).__name__} has no {', '.join(lacking) or 'head'} where Llama-like targets have it",
                              where=str(folder), remedy="Record states in the engine that serves it instead")
    return body


def _verify(target: Target) -> None:
    """Hold the family's traits against the loaded modules: same boundary 0, same final norm."""
    probe = torch.randn(2, 3, target.width, generator=torch.Generator().manual_seed(0)).to(target.device)
    ids = torch.arange(6, device=target.device).reshape(2, 3) % target.parts.vocab
    with torch.no_grad(), _mlp_silenced(target._layers[0]) as silenced:
        seen = target.run(ids, {0, 1}, {1} if target.partials else set())
        normed = target._norm(probe.to(target.dtype)).float()
    tolerance = 1e-4 if target.dtype == torch.float32 else 3e-2
    for name, mine, theirs in (("embedding", target.parts.embed(ids), seen.streams[0].float()),
                               ("final norm", target.parts.final_norm(probe), normed)):
        if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance):
            raise DraftscopeError(f"the {name} of model_type {target.config.model_type!r} does not work as in Llama",
                                  where=str(target.folder), remedy="This family of targets is not supported yet")
    # Without its MLP a layer gives out what enters the MLP's side; where it does not, that is no stream.
    target.partials = target.partials and silenced and torch.allclose(
        seen.partials[1].float(), seen.streams[1].float(), rtol=tolerance, atol=tolerance)


@contextmanager
def _mlp_silenced(layer: nn.Module) -> Iterator[bool]:
    """The layer's MLP gives zeros while this lasts; False where none is found."""
    def nothing(module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(torch.zeros_like(o) for o in output) if isinstance(output, tuple) else torch.zeros_like(output)

    found = next((child for name, child in layer.named_children() if name in MLPS), None)
    if found is None:
        yield False
        return
    handle = found.register_forward_hook(nothing)
    try:
        yield True
    finally:
        handle.remove()


def _needed(taps: Sequence[Boundary], layers: int) -> tuple[set[int], set[int]]:
    """Indices of the streams, and of the partials, that the taps need; the last state always."""
    streams, partials = {layers}, set()
    for tap in taps:
        low = 0 if tap.kind == "stream" else 1
        if not low <= tap.index <= layers:
            raise UsageError(f"{tap} does not exist: the target has {layers} layers",
                             remedy=f"Boundaries run from {low} to {layers}")
        if tap.norm == "post" and (tap.index != layers or tap.kind != "stream"):
            raise UsageError(f"{tap} does not exist: only boundary {layers}, the last, has a final norm")
        if tap.kind == "partial":
            partials.add(tap.index)
        else:
            streams |= {tap.index} | ({tap.index - 1} if tap.kind == "branch" else set())
    return streams, partials


@contextmanager
def _capture(
    layers: list[nn.Module], norm: nn.Module, mlp_input: str, streams: set[int], partials: set[int],
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Keep the inputs of the modules that the wanted states enter; hooks are gone afterwards."""
    held: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def keep(store: dict[int, Tensor], index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            store[index] = args[0] if args else kwargs["hidden_states"]
        return hook

    entered: list[nn.Module] = [*layers, norm]
    places = [(entered[b], keep(held[0], b)) for b in streams]
    places += [(getattr(layers[b - 1], mlp_input), keep(held[1], b)) for b in partials]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in places]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()


def _pick(tap: Boundary, run: Run) -> Tensor:
    if tap.norm == "post":
        return run.post
    if tap.kind == "partial":
        return run.partials[tap.index]
    if tap.kind == "branch":
        return run.streams[tap.index] - run.streams[tap.index - 1]
    return run.streams[tap.index]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
