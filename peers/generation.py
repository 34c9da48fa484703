"""What an inference peer makes of problems: groups, generated and scored, ready for the outbox.

    counters --training_problem--> prompts --engine--> completions --environment--> RolloutGroup --> bytes

Pure work without the network: it runs on the threads of the engine's calls, several at once where the engine
takes several.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from peers.engines import Completion, Engine, Generation
from peers.environments import Environment, Problem, Scored
from peers.environments.split import training_problem
from peers.models.base import Tokenizer
from peers.prompts import Prompts
from protocols.manifest import Manifest
from protocols.messages import RolloutGroup
from protocols.rollouts import pack_floats, pack_ids


@dataclass(frozen=True, slots=True)
class Made:
    """One call's groups, in the order of their counters, under one version."""

    version: int
    adapter: bytes
    groups: list[tuple[int, bytes]]
    """(counter, encoded RolloutGroup)."""
    tokens: int


class GroupMaker:
    """Turns counters into groups. `make` may run on as many threads at once as the engine takes calls."""

    def __init__(
        self, manifest: Manifest, peer_id: str, environment: Environment, tokenizer: Tokenizer, prompts: Prompts
    ) -> None:
        self.manifest = manifest
        self.peer_id = peer_id
        self.environment = environment
        self.tokenizer = tokenizer
        self.prompts = prompts
        self._scoring = (
            threading.Lock()
        )  # environments are the user's code, and were never promised more than one thread

    def prompt(self, counter: int) -> tuple[int, ...]:
        """The prompt of this peer's problem number `counter`."""
        return self.prompts.ids(self._problem(counter))

    def _problem(self, counter: int) -> Problem:
        return training_problem(self.environment, self.manifest.seed, self.peer_id, counter)

    def make(self, engine: Engine, counters: range) -> Made:
        """Generate and score. Raises PeerFault when the version cannot be sampled from, CancelledError when stopped."""
        with self._scoring:
            problems = [self._problem(counter) for counter in counters]
            prompts = [self.prompts.ids(problem) for problem in problems]
        seed = sampling_seed(self.manifest.seed, self.peer_id, counters.start)
        made = engine.generate(prompts, self.manifest.sampling, seed)
        groups = []
        with self._scoring:
            for counter, problem, prompt, answers in zip(counters, problems, prompts, made.groups, strict=True):
                group = self._group(counter, problem, prompt, answers, made, engine.name)
                groups.append((counter, msgspec.msgpack.encode(group)))
        tokens = sum(len(each.token_ids) for answers in made.groups for each in answers)
        return Made(made.version, made.adapter, groups, tokens)

    def _group(
        self,
        counter: int,
        problem: Problem,
        prompt: tuple[int, ...],
        answers: Sequence[Completion],
        made: Generation,
        engine: str,
    ) -> RolloutGroup:
        texts = [self.tokenizer.decode(each.token_ids) for each in answers]
        scores = [self.environment.score(problem, text) for text in texts]
        return RolloutGroup(
            counter=counter,
            oldest_version=made.version,
            newest_version=made.version,
            adapter=made.adapter,
            prompt_ids=pack_ids(prompt),
            lengths=tuple(len(each.token_ids) for each in answers),
            token_ids=pack_ids([token for each in answers for token in each.token_ids]),
            logprobs=pack_floats([value for each in answers for value in each.logprobs]),
            truncated=tuple(each.finish == "length" for each in answers),
            rewards=tuple(score.reward if isinstance(score, Scored) else None for score in scores),
            temperature=self.manifest.sampling.temperature,
            engine=engine,
        )


def sampling_seed(run_seed: int, peer_id: str, counter: int) -> int:
    """The seed of the call that begins with this counter: never twice the same for different problems."""
    text = f"echo-swarm/1/sampling\0{run_seed}\0{peer_id}\0{counter}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
