"""Held-out evaluation: greedy answers to problems that are never trained on (peers/environments/split.py)."""

from peers.engines.transformers_engine import TransformersEngine
from peers.environments import Environment, Scored
from peers.environments.split import held_out_problems
from peers.models.base import BaseModel
from peers.prompts import Prompts
from protocols.adapters import Adapter
from protocols.manifest import Manifest


def evaluate(
    model: BaseModel, adapter: Adapter, environment: Environment, manifest: Manifest, num_problems: int
) -> tuple[int, float | None]:
    """(problems scored, mean reward of greedy answers); None when nothing could be scored.

    An answer that hits max_new_tokens is scored as it stands; one that cannot be scored is left out.
    """
    problems = held_out_problems(environment, manifest.seed, num_problems)
    engine = TransformersEngine(model, manifest.lora)
    engine.load_adapter(0, adapter)
    prompts = Prompts(model.tokenizer, manifest.environment, model.name)
    answers = engine.greedy([prompts.ids(problem) for problem in problems], manifest.sampling.max_new_tokens)
    scores = [
        environment.score(problem, model.tokenizer.decode(answer.token_ids))
        for problem, answer in zip(problems, answers, strict=True)
    ]
    rewards = [score.reward for score in scores if isinstance(score, Scored)]
    return len(rewards), sum(rewards) / len(rewards) if rewards else None
