"""What `swarm init` and `swarm sim` begin with, for each model: what it can learn, and in which steps.

A model that learns nothing teaches nobody how a run works. So the two models that everybody can have come with sums
that they half know, and settings under which that shows within minutes on a laptop; any other model with a task as
it is, and with settings for a model of ordinary size.
"""

from dataclasses import dataclass, field

import msgspec

from bootstrap.config import EvaluationSection, ModelSection, RunConfig
from protocols.manifest import EnvironmentSpec, LearningSpec, LoraSpec
from protocols.messages import Sampling

# Every linear layer but the head, which many models tie to the input embeddings (r and alpha: prime-rl's).
_LAYERS = LoraSpec(
    r=16, alpha=32.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Sections of `run.toml` that suit a model."""

    environment: EnvironmentSpec
    """Of the task `chain_sum`."""
    steps: int
    """Of a simulation: the reward has clearly risen by then."""
    sampling: Sampling = field(default_factory=Sampling)
    lora: LoraSpec = field(default_factory=LoraSpec)
    learning: LearningSpec = field(default_factory=LearningSpec)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)


DEMOS = {
    # Sums that the built-in model half knows (peers/models/train_builtin.py); a minute on two cores.
    "builtin": Demo(
        environment=EnvironmentSpec(
            name="chain_sum",
            prompt="{expression}=",
            params={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        ),
        steps=60,
    ),
    # SmolLM2-135M can add but never stops there: it makes up the next sum. It learns to answer with the number alone,
    # and with the right one more often; what runs on is what must become rarer, so it is not left out of the loss.
    "smollm2": Demo(
        environment=EnvironmentSpec(
            name="chain_sum",
            prompt="2 + 3 = 5\n9 - 4 = 5\n7 + 8 = 15\n{expression} =",
            params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        ),
        steps=24,
        sampling=Sampling(max_new_tokens=6),
        lora=_LAYERS,
        learning=LearningSpec(batch_groups=8, learning_rate=2e-4, mask_truncated=False),
        evaluation=EvaluationSection(problems=100),
    ),
}
_STEPS = 60
_OTHER = LearningSpec(learning_rate=1e-4, batch_groups=16)  # a guess between the rates that LoRA papers use


def demo_steps(model: str) -> int:
    """How many steps a simulation with this model takes, unless it is told."""
    return DEMOS[model].steps if model in DEMOS else _STEPS


def starting_config(name: str, model: str, environment: str) -> RunConfig:
    """The configuration that a new run of this model and environment begins with; it has no trainer."""
    config = RunConfig(
        name=name, trainers=(), model=ModelSection(name=model), environment=environment_spec(environment)
    )
    demo = DEMOS.get(model)
    if demo is None:
        return msgspec.structs.replace(config, lora=_LAYERS, learning=_OTHER)
    if environment == demo.environment.name:
        config = msgspec.structs.replace(config, environment=demo.environment)
    return msgspec.structs.replace(
        config, sampling=demo.sampling, lora=demo.lora, learning=demo.learning, evaluation=demo.evaluation
    )


def environment_spec(name: str) -> EnvironmentSpec:
    """The section of an environment that is given by name alone."""
    return EnvironmentSpec(name=name)
