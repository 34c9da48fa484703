"""The trainer's own look at rollouts: a pass over a few groups of each batch, under the versions that they name.

    batch --Agreement.choose--> groups --Versions.logprobs (the learner's thread)--> gaps --Agreement.observe--> refused

It happens before the batch is trained. The policy in training is not touched: a second LoRA slot stands on the same
base weights. Rules and numbers are in protocols/agreement.py.
"""

import math
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from peers.ingest import Ingest
from peers.learning.learner import Scorer, TrainingGroup
from peers.models.base import BaseModel
from peers.models.lora import attach_lora, write_adapter
from protocols.adapters import Adapter
from protocols.agreement import Agreement, Verdict
from protocols.delivery import Queued
from protocols.manifest import LoraSpec
from protocols.messages import RolloutGroup

# Adapters of recent versions in memory: ten of 100 MB, and no more small ones than groups of one batch ever name.
# What does not fit is made again from the blobs on disk when it is asked for.
HELD_BYTES_MAX = 1024 * 1024 * 1024
HELD_MAX = 32


class Versions:
    """Recent versions of the policy, to score with. Synchronous; call it from the learner's thread."""

    def __init__(
        self, model: BaseModel, lora: LoraSpec, temperature: float, rebuild: Callable[[int], Adapter | None]
    ) -> None:
        """`rebuild` makes a version from what is on disk; None if that is not possible."""
        self._policy = attach_lora(model.module, lora, seed=0)  # which A stands there first does not matter
        self._scorer = Scorer(self._policy, temperature)
        self._rebuild = rebuild
        self._held: OrderedDict[int, Adapter | None] = OrderedDict()
        """The one that was used last at the end; None: it cannot be had."""
        self._loaded: int | None = None

    def keep(self, version: int, adapter: Adapter | None) -> None:
        """Have this version at hand from now on."""
        self._held[version] = adapter
        self._held.move_to_end(version)
        while len(self._held) > HELD_MAX or (len(self._held) > 1 and self._held_bytes() > HELD_BYTES_MAX):
            self._held.popitem(last=False)

    def logprobs(self, version: int, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]] | None:
        """Log-probability of each completion token under that version, by group and completion; None if its adapter
        cannot be had."""
        adapter = self._held[version] if version in self._held else self._rebuild(version)
        self.keep(version, adapter)
        if adapter is None:
            return None
        if self._loaded != version:
            write_adapter(self._policy, adapter)
            self._loaded = version
        return self._scorer.groups(groups)

    def _held_bytes(self) -> int:
        adapters = [adapter for adapter in self._held.values() if adapter is not None]
        return sum(len(tensor.data) for adapter in adapters for tensor in adapter.values())


class Examiner:
    """Looks at batches. A group that cannot be judged (its version is gone, or the trainer itself has no number for a
    token) says nothing for or against its producer."""

    def __init__(
        self,
        ingest: Ingest,
        agreement: Agreement,
        versions: Versions,
        in_thread: Callable[..., Awaitable[list[list[float] | None]]],
        dice: random.Random,
    ) -> None:
        """`in_thread` runs a function with its arguments on the learner's thread; `dice` nobody else may know."""
        self._ingest = ingest
        self._agreement = agreement
        self._versions = versions
        self._in_thread = in_thread
        self._dice = dice
        self.spent_s = 0.0
        """All looks together."""

    async def examine(self, batch: Sequence[Queued], settled: set[str]) -> dict[str, Verdict]:
        """Producers of the batch that do not run the version that they name. Whoever is looked at becomes `settled`:
        it is not looked at again when the batch is filled up."""
        begun_s = time.monotonic()
        chosen = self._agreement.choose(batch, self._dice, settled)
        opened = await self._ingest.opened([group.digest for group in chosen])
        found = await self._in_thread(self._look, opened) if chosen else []
        refused: dict[str, Verdict] = {}
        looks = []
        for queued, (group, _), gaps in zip(chosen, opened, found, strict=True):
            settled.add(queued.producer)
            looks.append(_told(queued.producer, group, gaps))
            if gaps is not None and queued.producer not in refused:
                verdict = self._agreement.observe(queued.producer, group.engine, group.newest_version, gaps)
                if verdict.refused:
                    refused[queued.producer] = verdict
        self.spent_s += time.monotonic() - begun_s
        if looks:
            self._ingest.node.metrics.emit("agreement", step=self._ingest.steps_done, groups=looks)
        return refused

    def _look(self, opened: Sequence[tuple[RolloutGroup, TrainingGroup]]) -> list[list[float] | None]:
        """Of all tokens of each group, in nats; None where there is no number for one. A group that spans versions is
        judged by the newest, whose digest it states."""
        found: dict[int, list[float] | None] = {}
        for version in sorted({group.newest_version for group, _ in opened}):
            of_version = {at: each for at, (group, each) in enumerate(opened) if group.newest_version == version}
            ours = self._versions.logprobs(version, list(of_version.values()))
            for i, (at, training) in enumerate(of_version.items()):
                found[at] = _gaps(ours[i], training.logprobs) if ours is not None else None
        return [found[at] for at in range(len(opened))]


def _gaps(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float] | None:
    pairs = (pair for rows in zip(ours, theirs, strict=True) for pair in zip(*rows, strict=True))
    gaps = [abs(mine - other) for mine, other in pairs]
    return gaps if all(map(math.isfinite, gaps)) else None


def _told(producer: str, group: RolloutGroup, gaps: Sequence[float] | None) -> dict[str, object]:
    """One look, for the event."""
    return {
        "peer_id": producer,
        "engine": group.engine,
        "version": group.newest_version,
        "tokens": len(gaps) if gaps else None,
        "mean": sum(gaps) / len(gaps) if gaps else None,
        "max": max(gaps) if gaps else None,
    }
