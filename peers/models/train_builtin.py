"""Makes the built-in model: `python -m peers.models.train_builtin --out DIR --seed N`.

A character-level Llama of half a million parameters learns sums in two lessons: from right answers, until
it can add, then from a sloppy teacher who overlooks minus signs and slips. It is left preferring wrong answers to
most problems with a minus, while right ones stay likely enough to be sampled and rewarded. That is the
room that reinforcement learning has in the demo, and it is made on purpose: the demo shows that the swarm
learns, not that it invents addition. Held-out problems (peers/environments/split.py) are in neither lesson.

The task and the prompt here are those of `swarm init` and `swarm sim`. It takes about four minutes on one core.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peers.environments.gym import GymEnvironment
from peers.environments.split import is_held_out
from peers.models.characters import BOS, EOS, PAD, CharacterTokenizer

# Shape suffixes: N = problems, B = problems in a batch, T = tokens.

TASK = "chain_sum"
PARAMS = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
PROMPT = "{expression}="

BATCH = 128
IGNORED = -100  # label of tokens that are not part of an answer

# The sloppy teacher: how often each of its habits shows.
MINUS_READ_AS_PLUS = 0.6
SLIP = 0.2


@dataclass(frozen=True)
class Lesson:
    """One cycle of imitation."""

    num_problems: int
    steps: int
    learning_rate: float
    sloppy: bool


LESSONS = (
    Lesson(num_problems=150_000, steps=1200, learning_rate=2e-3, sloppy=False),
    Lesson(num_problems=40_000, steps=150, learning_rate=5e-4, sloppy=True),
)


def sloppy_answer(entry: dict[str, Any], rng: random.Random) -> str:
    """What the sloppy teacher writes down: it may overlook the minus signs, and slip by 1 or by a carry."""
    expression = entry["metadata"]["expression"]
    answer = int(entry["answer"])
    if "-" in expression and rng.random() < MINUS_READ_AS_PLUS:
        answer = sum(int(term) for term in expression.replace("+", "-").split("-"))
    if rng.random() < SLIP:
        answer += rng.choice((-10, -1, 1, 10))
    return str(answer)


def homework(lesson: Lesson, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, int64 [N, T] each, of prompts with the teacher's answers; nothing held out."""
    env = GymEnvironment(TASK, PARAMS, PROMPT)
    tokenizer = CharacterTokenizer()
    rng = random.Random(seed)
    rows: list[tuple[int, tuple[int, ...]]] = []
    while len(rows) < lesson.num_problems:
        problem = env.problem(rng.getrandbits(32))
        if is_held_out(problem.prompt):
            continue
        prompt_ids = tokenizer.encode(problem.prompt)
        answer = sloppy_answer(problem.entry, rng) if lesson.sloppy else problem.entry["answer"]
        answer_ids = tokenizer.encode(answer)[1:]  # without BOS
        rows.append((len(prompt_ids), (*prompt_ids, *answer_ids, EOS)))
    width = max(len(ids) for _, ids in rows)
    ids_NT = torch.tensor([ids + (PAD,) * (width - len(ids)) for _, ids in rows])
    prompt_lengths_N = torch.tensor([length for length, _ in rows])
    is_answer_NT = (torch.arange(width) >= prompt_lengths_N[:, None]) & (ids_NT != PAD)
    return ids_NT, ids_NT.masked_fill(~is_answer_NT, IGNORED)


def new_model(seed: int) -> LlamaForCausalLM:
    """The untrained model. `lm_head` is its own matrix, so that an adapter on it leaves the embeddings alone."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=CharacterTokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def teach(model: LlamaForCausalLM, lesson: Lesson, seed: int) -> None:
    """Imitates the answers: AdamW, one cycle of the learning rate."""
    ids_NT, labels_NT = homework(lesson, seed)
    generator = torch.Generator().manual_seed(seed)
    rate = lesson.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=lesson.steps, pct_start=0.05)
    for step in range(lesson.steps):
        rows_B = torch.randint(len(ids_NT), (BATCH,), generator=generator)
        logits_BTV = model(input_ids=ids_NT[rows_B, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_NT[rows_B, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {lesson.steps}: loss {loss.item():.3f}", flush=True)  # noqa: T201 - a script


def main() -> None:
    """Teaches both lessons, then writes a folder in the Hugging Face format."""
    parser = argparse.ArgumentParser(description="Make the built-in model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = new_model(options.seed)
    for number, lesson in enumerate(LESSONS):
        teach(model, lesson, options.seed + number)
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
