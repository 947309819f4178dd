"""vLLM's example connector for hidden states copies through pinned CUDA memory; this one writes from the CPU, at once.

Named to vLLM by `kv_connector` and `kv_connector_module_path`; its folder must be on PYTHONPATH of the worker processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Written:
    """Stands where the base class expects the event of a copy in flight."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes {request}.safetensors with `hidden_states` [T, L, H] and `token_ids` [T], whole or not at all."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)
        places = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, places, len(pending.token_ids))
        path = Path(pending.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, part)
        part.replace(path)
        self._req_copy_events[pending.req_id] = Written()
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
            Path(f"{path}.lock").unlink(missing_ok=True)
