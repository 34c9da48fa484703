"""What vLLM mixes into its own workers for us: they die with their peer, and say which modules they can adapt.

vLLM imports this module in the process that holds the model. A peer that was killed with -9 cannot end its engine, and
vLLM's processes would wait for a client for ever; so this one watches the peer, and takes its own parent along.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from peers.engines.vllm_engine import PEER_PID


class WorkerExtension:
    """Methods that `collective_rpc` can call by name."""

    model_runner: Any  # the worker's own

    def unadapted(self, paths: Sequence[str]) -> list[str]:
        """Those of the base model's modules that an adapter would not reach: vLLM leaves them out without a word."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        model = self.model_runner.model
        manager = model.lora_manager
        reached = {name for module in manager.modules for name in manager.packed_modules.get(module, [module])}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        rename = None if mapper is None else mapper.get_rename_mapper()
        names = {
            path: parse_fine_tuned_lora_name(f"base_model.model.{path}.lora_A.weight", rename)[0] for path in paths
        }
        return [path for path in paths if names[path] not in reached]

    def held_adapters(self) -> list[int]:
        """Ids of the LoRA requests whose tensors are in this worker's memory."""
        return sorted(self.model_runner.model.lora_manager.list_adapters())

    def heal_cache(self) -> None:
        """Zeros for keys and values that are not numbers. Attention multiplies what it masks by zero, and zero times
        NaN is NaN: a block that an adapter spoiled would spoil every request that is given it later."""
        for cache in self.model_runner.kv_caches:
            if cache.is_floating_point():
                cache.nan_to_num_(0.0, 0.0, 0.0)


def _die_with(peer_pid: int) -> None:
    parent = multiprocessing.parent_process()  # vLLM's scheduler, or, where that holds the model itself, the peer
    with contextlib.suppress(psutil.NoSuchProcess):
        scheduler = None if parent is None or parent.pid == peer_pid else psutil.Process(parent.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(peer_pid).wait()
        if scheduler is not None:
            scheduler.kill()  # it would hang at its exit
    os._exit(1)


if PEER_PID in os.environ:
    watch = threading.Thread(
        target=_die_with, args=(int(os.environ[PEER_PID]),), daemon=True, name="dies with its peer"
    )
    watch.start()
