"""Which problems are held out, and which problem a peer must answer next.

Whether a problem is held out depends on nothing but its prompt, so nobody needs a list: a problem that
two seeds both produce is on the same side for both. Which problem a peer trains on follows from
(run seed, peer id, counter), so nobody can pick easy ones and a trainer can make it again.

    (run seed, peer id, counter, attempt) --sha256--> seed --environment--> prompt --sha256--> side
"""

import hashlib

from peers.environments import Environment, Problem

HELD_OUT_ONE_IN = 10  # 10 % is enough for an evaluation and takes little from training

# A space whose prompts are nearly all held out would never end a search. Where a tenth is held out,
# 1000 misses in a row mean that the space is a handful of prompts, not bad luck.
ATTEMPTS_MAX = 1000

_SIDE_DOMAIN = b"echo-swarm/1/held-out\0"
_TRAINING_DOMAIN = b"echo-swarm/1/training-problem\0"
_HELD_OUT_DOMAIN = b"echo-swarm/1/held-out-problem\0"


def is_held_out(prompt: str) -> bool:
    """Whether this prompt is kept for evaluation, never for training."""
    digest = hashlib.sha256(_SIDE_DOMAIN + prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def training_problem(env: Environment, run_seed: int, peer_id: str, counter: int) -> Problem:
    """Problem number `counter` of this peer; never a held-out one.

    Raises ValueError when ATTEMPTS_MAX draws in a row are held out: the environment has hardly any problems.
    """
    for attempt in range(ATTEMPTS_MAX):
        problem = env.problem(_seed(_TRAINING_DOMAIN, run_seed, peer_id, counter, attempt))
        if not is_held_out(problem.prompt):
            return problem
    raise ValueError(f"{ATTEMPTS_MAX} problems in a row were held out: the environment has too few to train on")


def held_out_problems(env: Environment, run_seed: int, n: int) -> list[Problem]:
    """Up to `n` held-out problems with distinct prompts; fewer when the environment has too few."""
    found: dict[str, Problem] = {}
    misses = 0
    for attempt in range(n * ATTEMPTS_MAX):
        if len(found) == n or misses == ATTEMPTS_MAX:
            break
        problem = env.problem(_seed(_HELD_OUT_DOMAIN, run_seed, attempt))
        if is_held_out(problem.prompt) and problem.prompt not in found:
            found[problem.prompt] = problem
            misses = 0
        else:
            misses += 1
    return list(found.values())


def _seed(domain: bytes, *parts: int | str) -> int:
    """A seed below 2^32 (the most numpy takes); no part holds a NUL, so the joined text is unambiguous."""
    digest = hashlib.sha256(domain + "\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big")
