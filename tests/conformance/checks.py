"""The checks. Each takes a Subject and raises Nonconforming when its engine breaks the contract of `peers.engines`."""

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import psutil
import torch

from peers.engines import Completion, Engine, Generation
from peers.models.lora import to_adapter
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling
from tests.conformance.reference import GAIN, Agreement, Reference, of_ids, require
from tests.conformance.subject import Subject

Check = Callable[[Subject], None]
Ids = Sequence[int]

# A difference is one that an engine makes on purpose, and not rounding, when it is so many times the limit.
CLEAR = 5.0

# Chi-square of 10 degrees of freedom exceeds this once in ten thousand; the seeds are fixed, so it is once for all.
CHI_SQUARE_BINS, CHI_SQUARE_MAX = 10, 35.56
CHI_SQUARE_DRAWS = 2048  # enough to see a temperature that is a fifth too low

LONG_CALL_S = 0.3  # what is left of a call that is met in its middle: a busy machine may stop us for as long
LONG_PROMPTS_MAX = 512  # of 32 rows each: a minute of any engine on two cores
STOP_S = 20.0  # a token of 1,024 rows takes a second or two; a process that ends has about as long
SWAPS, SWAPS_SETTLED = 200, 60  # allocators and caches are warm after the first
GROWTH_MAX = 0.2  # of the bytes of the adapters that were swapped in; all of them kept would be 1


def well_formed(rows: Sequence[Completion], ends: frozenset[int], new_tokens: int) -> None:
    """Lengths, end ids and the reason for the end belong together in every completion."""
    for row in rows:
        inner, last = row.token_ids[:-1], row.token_ids[-1:]
        require(1 <= len(row.token_ids) <= new_tokens, f"{len(row.token_ids)} tokens where 1 to {new_tokens} are due")
        require(len(row.logprobs) == len(row.token_ids), "not one log-probability for each token")
        require(not ends.intersection(inner), "goes on after an end-of-sequence id")
        finish = "stop" if ends.intersection(last) else "length"
        require(row.finish == finish, f"says {row.finish} where the last id says {finish}")
        full = len(row.token_ids) == new_tokens
        require(finish == "stop" or full, f"ends after {len(row.token_ids)} tokens without an end-of-sequence id")
        require(all(math.isfinite(p) and p <= 1e-4 for p in row.logprobs), "log-probabilities above 0 or not finite")


def well_formed_groups(subject: Subject, made: Generation, sampling: Sampling, num_prompts: int) -> None:
    """A group for each prompt, each of the size that was asked for."""
    sizes = [len(group) for group in made.groups]
    require(sizes == [sampling.group_size] * num_prompts, f"groups of {sizes} for {num_prompts} prompts")
    well_formed([row for group in made.groups for row in group], subject.ends, sampling.max_new_tokens)


def sampling_of(subject: Subject, temperature: float = 1.0) -> Sampling:
    """What the checks sample with."""
    return Sampling(group_size=subject.size.group_size, max_new_tokens=subject.size.new_tokens, temperature=temperature)


def require_greedy(
    subject: Subject, adapter: Adapter, prompts: Sequence[Ids], rows: Sequence[Completion], what: str
) -> None:
    """Each token is the reference's best, or as good as that; the log-probabilities are those at temperature 1."""
    differences = []
    for prompt, row in zip(prompts, rows, strict=True):
        (reference_TV,) = subject.reference.distributions(adapter, prompt, [row.token_ids])
        chosen_T = of_ids(reference_TV, row.token_ids)
        gap = (reference_TV.max(dim=-1).values - chosen_T).max().item()
        require(gap <= subject.limits.gap, f"{what}: a token {gap:.2g} nats below the best, limit {subject.limits.gap}")
        differences.append(torch.tensor(row.logprobs) - chosen_T)
    Agreement.of(torch.cat(differences)).require_within(subject.limits, what)


# --- what is computed


def greedy_agrees(subject: Subject) -> None:
    """The likeliest continuation is the reference's, but for ties."""
    adapter = subject.reference.adapter(seed=1)
    subject.load(adapter)
    rows = subject.engine.greedy(subject.prompts, subject.size.new_tokens)
    require(len(rows) == len(subject.prompts), f"{len(rows)} answers to {len(subject.prompts)} prompts")
    well_formed(rows, subject.ends, subject.size.new_tokens)
    require_greedy(subject, adapter, subject.prompts, rows, "greedy")


def _sampled_agree(subject: Subject, temperature: float) -> None:
    reference, sampling = subject.reference, sampling_of(subject, temperature)
    adapter = reference.adapter(seed=2)
    version = subject.load(adapter)
    made = subject.engine.generate(subject.prompts, sampling, seed=3)
    require(made.version == version, f"generated under version {made.version}, {version} was loaded")
    require(made.adapter == adapter_digest(adapter), "names another adapter than the one that was loaded")
    well_formed_groups(subject, made, sampling, len(subject.prompts))
    gap_T = reference.differences(adapter, subject.prompts, made.groups, temperature)
    Agreement.of(gap_T).require_within(subject.limits, f"temperature {temperature:g}")
    # And the comparison can fail: at another temperature the same tokens have clearly other log-probabilities.
    other_T = reference.differences(adapter, subject.prompts, made.groups, temperature * 1.5)
    require(other_T.abs().mean().item() > subject.limits.mean * CLEAR, "the temperature makes no difference: no test")


def logprobs_agree(subject: Subject) -> None:
    """Log-probabilities of what was sampled are the trainer's."""
    _sampled_agree(subject, 1.0)


def temperature_enters_the_logprobs(subject: Subject) -> None:
    """Below and above 1, too."""
    _sampled_agree(subject, 0.6)
    _sampled_agree(subject, 1.3)


def samples_follow_the_distribution(subject: Subject) -> None:
    """Chi-square of first tokens against the reference's probabilities: the likeliest one by one, the rest together."""
    reference = subject.reference
    adapter = reference.adapter(seed=2)
    subject.load(adapter)
    prompt, size = subject.prompts[0], 64
    prompts = [prompt] * (CHI_SQUARE_DRAWS // size)
    sampling = Sampling(group_size=size, max_new_tokens=1, temperature=1.3)
    groups = subject.engine.generate(prompts, sampling, seed=4).groups
    drawn = [[row.token_ids[0] for row in group] for group in groups]
    require(all(a != b for a, b in pairwise(drawn)), "the same prompt twice in a call gets the same draws")
    (reference_TV,) = reference.distributions(adapter, prompt, [[0]], sampling.temperature)
    top = reference_TV[0].topk(CHI_SQUARE_BINS)
    probability = dict(zip(top.indices.tolist(), top.values.exp().tolist(), strict=True))
    counts = Counter(token if token in probability else None for group in drawn for token in group)
    expected = {**probability, None: 1.0 - sum(probability.values())}
    total = counts.total()
    statistic = sum((counts[token] - total * p) ** 2 / (total * p) for token, p in expected.items())
    require(
        statistic < CHI_SQUARE_MAX,
        f"first tokens do not follow the distribution: chi-square {statistic:.0f} over {total} draws, "
        f"limit {CHI_SQUARE_MAX} for {CHI_SQUARE_BINS} degrees of freedom",
    )


def a_batch_answers_like_its_prompts_alone(subject: Subject) -> None:
    """Case B87: neither padding nor neighbours change an answer."""
    adapter = subject.reference.adapter(seed=1)
    subject.load(adapter)
    together = subject.engine.greedy(subject.prompts, subject.size.new_tokens)
    alone = [subject.engine.greedy([prompt], subject.size.new_tokens)[0] for prompt in subject.prompts]
    for prompt, a, b in zip(subject.prompts, together, alone, strict=True):
        _require_alike(subject, adapter, prompt, a, b, "a batch and its prompts alone")


def _require_alike(subject: Subject, adapter: Adapter, prompt: Ids, a: Completion, b: Completion, what: str) -> None:
    """Two greedy answers: the same, as far as ties of the reference allow."""
    same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
    if same is None:
        require(a.token_ids == b.token_ids, f"{what} differ in length")
        same = len(a.token_ids)
    else:
        (reference_TV,) = subject.reference.distributions(adapter, prompt, [a.token_ids])
        x, y = (reference_TV[same, each.token_ids[same]].item() for each in (a, b))
        require(abs(x - y) <= subject.limits.gap, f"{what} differ in token {same}, {abs(x - y):.2g} nats apart")
    largest = max((abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)), default=0.0)
    require(largest <= 2 * subject.limits.max, f"{what} differ by {largest:.2g} nats")  # each may be off by one max


# --- the adapter


def every_module_is_adapted(subject: Subject) -> None:
    """Modules one by one, all others silent: the output follows the trainer's, so each of them is applied (B75)."""
    reference, prompts = subject.reference, subject.prompts[:4]
    base = reference.adapter(seed=5, gain=0.0)
    for path in reference.modules:
        adapter = _telling(subject, prompts, base, path)
        subject.load(adapter)
        rows = subject.engine.greedy(prompts, 2)
        require_greedy(subject, adapter, prompts, rows, f"with nothing but {path}")
    found = len(reference.modules)
    due = subject.found.config["num_hidden_layers"] * len(subject.lora.targets)
    require(found == due, f"{found} modules are adapted, the manifest names {due}")


def _telling(subject: Subject, prompts: Sequence[Ids], base: Adapter, path: str) -> Adapter:
    """An adapter of this module alone, strong enough that to leave it out would show clearly with a prompt or more."""
    reference, clear = subject.reference, subject.limits.max * CLEAR
    gain = 1.0
    while gain < 1e4:  # a guess: at ten thousand nothing of the model is left
        adapter = reference.adapter(seed=5, gain=gain, only=[path])
        changes = []
        for prompt in prompts:
            (before_TV,) = reference.distributions(base, prompt, [[0]])
            (after_TV,) = reference.distributions(adapter, prompt, [[0]])
            best = after_TV[0].argmax()
            changes.append((after_TV[0, best] - before_TV[0, best]).abs().item())
        if max(changes) > clear:
            return adapter
        gain *= 4
    raise ValueError(f"{path} has no effect on the reference")


def a_fresh_adapter_is_the_base_model(subject: Subject) -> None:
    """B = 0 changes nothing, and another one does."""
    reference = subject.reference
    for what, gain in (("a trained adapter", GAIN), ("a fresh adapter", 0.0)):
        adapter = reference.adapter(seed=6, gain=gain)
        subject.load(adapter)
        rows = subject.engine.greedy(subject.prompts, subject.size.new_tokens)
        require_greedy(subject, adapter, subject.prompts, rows, what)


def bfloat16_adapters_are_applied(subject: Subject) -> None:
    """As runs publish them: the values are those of the float32 adapter of the same numbers."""
    narrow, wide = {}, {}
    for name, tensor in subject.reference.adapter(seed=7).items():
        values = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape).bfloat16()
        narrow[name] = Tensor("BF16", tensor.shape, values.view(torch.int16).numpy().tobytes())
        wide[name] = values.float()
    subject.load(narrow)
    rows = subject.engine.greedy(subject.prompts, subject.size.new_tokens)
    require_greedy(subject, to_adapter(wide), subject.prompts, rows, "a bfloat16 adapter")


def a_swap_leaves_no_trace(subject: Subject) -> None:
    """Case B74: prompts that were answered under A are answered under B as by an engine that never saw A."""
    engine, reference = subject.engine, subject.reference
    a, b = reference.adapter(seed=8), reference.adapter(seed=9)
    prompts, new_tokens = subject.long_prompts, subject.size.new_tokens
    sampling = Sampling(group_size=2, max_new_tokens=new_tokens)
    for adapter in (a, b, a, b):
        subject.load(adapter)
        warm = engine.greedy(prompts, new_tokens)
        require_greedy(subject, adapter, prompts, warm, "after a swap")
        made = engine.generate(prompts, sampling, seed=10)
        gap_T = reference.differences(adapter, prompts, made.groups)
        Agreement.of(gap_T).require_within(subject.limits, "sampled after a swap")
    with subject.fresh() as cold:
        subject.load(b, cold)
        for prompt, x, y in zip(prompts, warm, cold.greedy(prompts, new_tokens), strict=True):
            _require_alike(subject, b, prompt, x, y, "warm and cold")


def a_number_that_comes_again_brings_its_own_adapter(subject: Subject) -> None:
    """What counts is what was handed over, not its number: nothing is kept by number alone."""
    reference, prompts = subject.reference, subject.long_prompts
    for seed in (8, 9):
        adapter = reference.adapter(seed)
        subject.engine.load_adapter(1_000_000, adapter)
        rows = subject.engine.greedy(prompts, subject.size.new_tokens)
        require_greedy(subject, adapter, prompts, rows, "a number that comes again")


def the_scale_is_alpha_over_r(subject: Subject) -> None:
    """Case B82: r = 8 with alpha 4, 16, 32; and what rsLoRA calls alpha is our alpha * sqrt(r)."""
    r, seed = 8, 11
    alphas = (4.0, 16.0, 32.0)
    plain = [LoraSpec(r=r, alpha=alpha, targets=subject.lora.targets) for alpha in alphas]
    references = [Reference(subject.base, lora) for lora in plain]
    # rsLoRA scales by alpha / sqrt(r), which is ours at alpha * sqrt(r).
    references.append(Reference(subject.base, plain[0], rslora=True))
    plain.append(LoraSpec(r=r, alpha=alphas[0] * math.sqrt(r), targets=subject.lora.targets))
    adapter = references[0].adapter(seed)
    prompts = subject.prompts[:2]
    rows: list[Completion] = []
    for lora, reference in zip(plain, references, strict=True):
        with subject.fresh(lora) as engine:
            subject.load(adapter, engine)
            rows = engine.greedy(prompts, subject.size.new_tokens)
        gap_T = reference.differences(adapter, prompts, [[row] for row in rows])
        what = f"alpha {lora.alpha:.3g} over r {lora.r}"
        Agreement.of(gap_T).require_within(subject.limits, what)
    scales = [torch.cat(each.logprobs(adapter, prompts[0], [rows[0].token_ids])) for each in references]
    apart = min((x - y).abs().mean().item() for i, x in enumerate(scales) for y in scales[:i])
    require(apart > CLEAR * subject.limits.mean, "the scale makes no difference: no test")


def an_adapter_that_does_not_fit_is_refused(subject: Subject) -> None:
    """Case B75: other names, missing and additional modules, wrong shapes and values; the one before stays."""
    engine, reference = subject.engine, subject.reference
    good, other = reference.adapter(seed=12), reference.adapter(seed=13)
    version = subject.load(good)
    name = max(other)
    tensor = other[name]
    nan = to_adapter({name: torch.full(tensor.shape, math.nan)})
    wrong: dict[str, Adapter] = {
        "nothing at all": {},
        "another prefix": {f"base_model.{each}": other[each] for each in other},
        "a model of another kind": {each.replace("model.", "model.language_model.", 1): other[each] for each in other},
        "a missing matrix": {each: other[each] for each in other if each != name},
        "one more layer": {**other, "model.layers.999.mlp.up_proj.lora_A": tensor},
        "a typo": {each.replace("up_proj", "up_porj"): other[each] for each in other},
        "another rank": Reference(subject.base, LoraSpec(r=4, targets=subject.lora.targets)).adapter(seed=13),
        "a transposed matrix": {**other, name: tensor._replace(shape=tensor.shape[::-1])},
        "too few bytes": {**other, name: tensor._replace(data=tensor.data[:-4])},
        "values that are no numbers": {**other, **nan},
    }
    for what, adapter in wrong.items():
        try:
            engine.load_adapter(version + 1, adapter)
        except PeerFault:
            continue
        require(False, f"takes an adapter with {what}")
    made = engine.generate(subject.prompts[:1], sampling_of(subject), seed=0)
    require(
        (made.version, made.adapter) == (version, adapter_digest(good)), "a refused adapter replaces the one before"
    )
    gap_T = reference.differences(good, subject.prompts[:1], made.groups)
    Agreement.of(gap_T).require_within(subject.limits, "after refused adapters")


def an_adapter_without_probabilities_is_a_peers_fault(subject: Subject) -> None:
    """Finite values that lead to no distribution; the next adapter works again."""
    subject.load(subject.reference.adapter(seed=14, gain=1e30))
    try:
        subject.engine.generate(subject.prompts[:1], sampling_of(subject), seed=0)
    except PeerFault:
        pass
    else:
        require(False, "samples from no distribution")
    subject.load(subject.reference.adapter(seed=1))
    try:
        subject.engine.generate(subject.prompts, sampling_of(subject), seed=0)
    except PeerFault as fault:
        require(False, f"an adapter without probabilities spoils the next one: {fault}")
    greedy_agrees(subject)


# --- ends, seeds, edges


def completions_end_where_they_should(subject: Subject) -> None:
    """At any of the ends, which is part of the completion, or at the limit; a prompt may hold an end."""
    engine = subject.engine
    subject.load(subject.reference.adapter(seed=1))
    ended = {(*prompt, end) for prompt in subject.prompts[:2] for end in subject.ends}
    prompts = [*subject.prompts, *sorted(ended)]
    finishes: Counter[str] = Counter()
    for new_tokens in (subject.size.new_tokens, 2, 1):
        sampling = Sampling(group_size=subject.size.group_size, max_new_tokens=new_tokens, temperature=1.3)
        made = engine.generate(prompts, sampling, seed=15)
        well_formed_groups(subject, made, sampling, len(prompts))
        well_formed(engine.greedy(prompts, new_tokens), subject.ends, new_tokens)
        finishes.update(row.finish for group in made.groups for row in group)
    require(set(finishes) == {"stop", "length"}, f"every completion ends alike: {dict(finishes)}")


def seeds_decide(subject: Subject) -> None:
    """The same seed gives the same completions, whatever came between; another does not; group members differ."""
    engine, sampling = subject.engine, sampling_of(subject)
    subject.load(subject.reference.adapter(seed=1))
    first, between, again = (_ids(engine.generate(subject.prompts, sampling, seed)) for seed in (17, 18, 17))
    alike = sum(len(set(group)) == 1 for group in first)  # of one group it may be chance: an answer may be near certain
    require(alike <= len(first) // 2, f"all completions of a prompt are the same, for {alike} of {len(first)} prompts")
    require(first == again, "the same seed gives other completions")
    require(first != between, "another seed gives the same completions")


def _ids(made: Generation) -> list[list[tuple[int, ...]]]:
    return [[row.token_ids for row in group] for group in made.groups]


def what_cannot_be_asked_is_refused(subject: Subject) -> None:
    """No adapter yet, an empty prompt: ValueError. No prompts: no groups."""
    adapter = subject.reference.adapter(seed=1)
    subject.load(adapter)
    made = subject.engine.generate([], sampling_of(subject), seed=0)
    require(made.groups == [] and made.adapter == adapter_digest(adapter), "no prompts, but groups")
    for ask in (
        lambda: subject.engine.generate([(1,), ()], sampling_of(subject), seed=0),
        lambda: subject.engine.greedy([()], 1),
    ):
        try:
            ask()
        except ValueError:
            continue
        require(False, "continues a prompt without tokens")


def nothing_is_generated_before_the_first_adapter(subject: Subject) -> None:
    """On an engine of its own."""
    with subject.fresh() as engine:
        try:
            engine.generate(subject.prompts[:1], sampling_of(subject), seed=0)
        except ValueError:
            return
    require(False, "generates before the first adapter")


# --- while it generates


@contextmanager
def _under_way(subject: Subject, engine: Engine, at_least_s: float) -> Iterator[tuple[Future[Generation], Sampling]]:
    """A call of `generate` with a tenth behind it, and `at_least_s` or more before it: rows are added until it has."""
    prompts, group_size = subject.prompts[:1], 32
    with ThreadPoolExecutor(1) as pool:
        while len(prompts) <= LONG_PROMPTS_MAX:
            sampling = Sampling(group_size=group_size, max_new_tokens=subject.size.long_tokens)
            begun_s = time.perf_counter()
            pool.submit(engine.generate, prompts, sampling, 19).result()
            lasts_s = time.perf_counter() - begun_s
            if lasts_s < 1.2 * at_least_s:
                prompts = prompts * 2
                continue
            call = pool.submit(engine.generate, prompts, sampling, 19)
            try:
                call.result(timeout=0.1 * lasts_s)
            except TimeoutError:
                yield call, sampling
                return
    raise ValueError(f"calls take under {at_least_s} s: too fast to be met in the middle")


def a_call_ends_under_the_version_it_began_with(subject: Subject) -> None:
    """Case B85: three versions come while a call generates; it keeps its own to the end, the next has the newest."""
    engine, reference = subject.engine, subject.reference
    old = reference.adapter(seed=20)
    later = [reference.adapter(seed) for seed in (21, 22, 23)]
    begun_s = time.perf_counter()
    version = subject.load(old)
    load_s = time.perf_counter() - begun_s
    with _under_way(subject, engine, LONG_CALL_S + 3 * len(later) * load_s) as (call, sampling):
        versions = [subject.load(adapter) for adapter in later]
        require(not call.done(), "a version is only taken when the call before it has ended")
        if engine.calls > 1:
            _require_under(subject, engine.generate(subject.prompts[:1], sampling, 24), versions[-1], later[-1])
        _require_under(subject, call.result(), version, old)
    _require_under(subject, engine.generate(subject.prompts[:1], sampling, 24), versions[-1], later[-1])


def _require_under(subject: Subject, made: Generation, version: int, adapter: Adapter) -> None:
    """All of it was sampled with this adapter, and it says so."""
    require(made.version == version, f"says version {made.version} where it began with {version}")
    require(made.adapter == adapter_digest(adapter), "names another adapter than its version's")
    gap_T = subject.reference.differences(adapter, subject.prompts[:1] * len(made.groups), made.groups)
    Agreement.of(gap_T).require_within(subject.limits, f"version {version}, while others came")


def a_stop_ends_what_is_under_way(subject: Subject) -> None:
    """Case B92: CancelledError at the next token, and ever after."""
    with subject.fresh() as engine:
        subject.load(subject.reference.adapter(seed=1), engine)
        with _under_way(subject, engine, LONG_CALL_S) as (call, sampling):
            engine.stop()
            try:
                call.result(timeout=STOP_S)
            except CancelledError:
                pass
            except TimeoutError:
                require(False, f"goes on generating {STOP_S:.0f} s after it was stopped")
            else:
                require(False, "generates to the end although it was stopped")
        try:
            engine.generate(subject.prompts[:1], sampling, seed=0)
        except CancelledError:
            return
    require(False, "generates after it was stopped")


def many_swaps_take_no_memory(subject: Subject) -> None:
    """Case B84: 200 versions, each generated with."""
    reference = subject.reference
    adapters = [reference.adapter(seed) for seed in (25, 26)]
    size = sum(len(tensor.data) for tensor in adapters[0].values())
    settled = 0
    for swap in range(SWAPS):
        adapter = adapters[swap % 2]
        subject.load(adapter)
        rows = subject.engine.greedy(subject.prompts[:1], 2)
        if swap == SWAPS_SETTLED:
            settled = memory_bytes()
    growth = (memory_bytes() - settled) / (size * (SWAPS - SWAPS_SETTLED))
    require(growth < GROWTH_MAX, f"{SWAPS} swaps: each leaves {growth:.2f} of an adapter behind")
    require_greedy(subject, adapter, subject.prompts[:1], rows, f"after {SWAPS} swaps")


def memory_bytes() -> int:
    """Resident memory of this process and of those that it started."""
    gc.collect()
    here = psutil.Process()
    total = 0
    for process in (here, *here.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


CHECKS: tuple[Check, ...] = (
    greedy_agrees,
    logprobs_agree,
    temperature_enters_the_logprobs,
    samples_follow_the_distribution,
    a_batch_answers_like_its_prompts_alone,
    every_module_is_adapted,
    a_fresh_adapter_is_the_base_model,
    bfloat16_adapters_are_applied,
    a_swap_leaves_no_trace,
    a_number_that_comes_again_brings_its_own_adapter,
    the_scale_is_alpha_over_r,
    an_adapter_that_does_not_fit_is_refused,
    an_adapter_without_probabilities_is_a_peers_fault,
    completions_end_where_they_should,
    seeds_decide,
    what_cannot_be_asked_is_refused,
    nothing_is_generated_before_the_first_adapter,
    a_call_ends_under_the_version_it_began_with,
    a_stop_ends_what_is_under_way,
)
LONG_CHECKS: tuple[Check, ...] = (many_swaps_take_no_memory,)
"""Minutes on a real model."""
