"""The co-located loop: generate, score, learn in one process, one after the other, with no swarm in between.

Each version is rounded as for the road, and both halves go on from what a receiver would rebuild. What sequential mode
at `refresh_gap` 0 must equal; and the yardstick that modes are measured against.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from peers.engines.transformers_engine import TransformersEngine
from peers.environments import Scored
from peers.environments.load import load_environment
from peers.environments.split import training_problem
from peers.generation import sampling_seed
from peers.learning.learner import Learner, StepReport, TrainingGroup
from peers.models.load import load_model
from peers.prompts import Prompts
from peers.publishing import Published, Publisher
from protocols.manifest import Manifest


@dataclass
class Spent:
    """Seconds of each half."""

    generate_s: float = 0.0
    train_s: float = 0.0
    reports: list[StepReport] = field(default_factory=list)


class Colocated:
    """One model that writes, one that learns; both hold the same adapter before each batch."""

    def __init__(self, manifest: Manifest, producer: str, first_counter: int, groups_per_call: int) -> None:
        """`producer` and `first_counter` decide the problems, `groups_per_call` how they are batched."""
        self.manifest, self.producer, self.counter = manifest, producer, first_counter
        self.groups_per_call = groups_per_call
        self.environment = load_environment(manifest.environment, False)
        self.model = load_model(manifest.model.name)
        self.prompts = Prompts(self.model.tokenizer, manifest.environment, manifest.model.name)
        self.engine = TransformersEngine(load_model(manifest.model.name), manifest.lora)
        self.learner = Learner(
            self.model, manifest.lora, manifest.learning, manifest.sampling.temperature, manifest.seed
        )
        self.publisher = Publisher(manifest.transfer)
        self.published: Published = self.publisher.publish(self.learner.target())
        """The newest version."""
        self.learner.load_adapter(self.published.rebuilt)
        self.spent = Spent()

    def step(self) -> StepReport:
        """Load the newest version, write one batch, take one optimizer step on it, make the next version."""
        begun_s = time.perf_counter()
        self.engine.load_adapter(self.learner.steps, self.published.rebuilt)
        groups = list(self._batch(self.manifest.learning.batch_groups))
        generated_s = time.perf_counter()
        report = self.learner.step(groups)
        if report.skipped is None:
            self.published = self.publisher.publish(self.learner.target())
            self.learner.settle(self.published.rebuilt)
        self.spent.generate_s += generated_s - begun_s
        self.spent.train_s += time.perf_counter() - generated_s
        self.spent.reports.append(report)
        return report

    def _batch(self, num_groups: int) -> Iterator[TrainingGroup]:
        while num_groups > 0:
            size = min(self.groups_per_call, num_groups)
            yield from self._call(range(self.counter, self.counter + size))
            self.counter += size
            num_groups -= size

    def _call(self, counters: range) -> Iterator[TrainingGroup]:
        manifest, tokenizer = self.manifest, self.model.tokenizer
        problems = [training_problem(self.environment, manifest.seed, self.producer, each) for each in counters]
        prompts = [self.prompts.ids(problem) for problem in problems]
        seed = sampling_seed(manifest.seed, self.producer, counters.start)
        answers = self.engine.generate(prompts, manifest.sampling, seed)
        for problem, prompt, completions in zip(problems, prompts, answers.groups, strict=True):
            scores = [self.environment.score(problem, tokenizer.decode(each.token_ids)) for each in completions]
            yield TrainingGroup(
                prompt_ids=prompt,
                completions=tuple(each.token_ids for each in completions),
                logprobs=tuple(tuple(each.logprobs) for each in completions),
                rewards=tuple(score.reward if isinstance(score, Scored) else None for score in scores),
                truncated=tuple(each.finish == "length" for each in completions),
            )
