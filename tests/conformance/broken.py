"""Engines with one fault each, around one that is right: what each check must be able to find."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import msgspec
import torch

from peers.engines import Completion, Engine, Generation
from peers.models.base import ModelFiles
from peers.models.load import load_weights
from peers.models.lora import to_adapter
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling
from tests.conformance.reference import Reference
from tests.conformance.subject import Build

Ids = Sequence[int]


class Wrapped:
    """The engine inside, as it is; each fault changes one thing."""

    def __init__(self, build: Build, files: ModelFiles, lora: LoraSpec) -> None:
        self.inner = build(files, lora)
        self.build, self.files, self.lora = build, files, lora
        self.name, self.device, self.dtype = self.inner.name, self.inner.device, self.inner.dtype
        self.calls = self.inner.calls
        self.digest = b""

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        self.inner.load_adapter(version, self.loaded(adapter))
        self.digest = adapter_digest(adapter)

    def loaded(self, adapter: Adapter) -> Adapter:
        """What is really applied."""
        return adapter

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        made = self.inner.generate(prompts, sampling, seed)
        groups = [
            [self.said(row, prompt, sampling) for row in group]
            for prompt, group in zip(prompts, made.groups, strict=True)
        ]
        return Generation(made.version, self.digest, groups)

    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        """What is said of a sampled completion."""
        return row

    def greedy(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Completion]:
        return self.inner.greedy(prompts, max_new_tokens)

    def stop(self) -> None:
        self.inner.stop()

    def close(self) -> None:
        self.inner.close()


def scaled(adapter: Adapter, factor: Callable[[str], float]) -> Adapter:
    """Each B times what its module's path gives."""
    made = dict(adapter)
    for name, tensor in adapter.items():
        if name.endswith(".lora_B") and tensor.dtype == "F32":
            values = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)
            made |= to_adapter({name: values * factor(name.removesuffix(".lora_B"))})
    return made


# --- the adapter


class IgnoresTheAdapter(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda _: 0.0)


class ScalesTwice(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda _: self.lora.alpha / self.lora.r)


class ForgetsTheRank(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda _: float(self.lora.r))


class ScalesByTheRootOfTheRank(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda _: math.sqrt(self.lora.r))


class IgnoresAlpha(Wrapped):
    """Right as long as the run has the usual alpha, 2 r."""

    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda _: 2 * self.lora.r / self.lora.alpha)


class ForgetsAModule(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        return scaled(adapter, lambda path: 0.0 if path.endswith("layers.0.self_attn.q_proj") else 1.0)


class TakesUnknownNames(Wrapped):
    """Leaves out what it does not know, as some loaders do."""

    def loaded(self, adapter: Adapter) -> Adapter:
        fresh = Reference(load_weights(self.files), self.lora).adapter(seed=0, gain=0.0)
        return {name: adapter.get(name, fresh[name]) for name in fresh}


class TakesZerosForNothing(Wrapped):
    """Leaves the adapter before in place when the next one changes nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: Adapter = {}

    def loaded(self, adapter: Adapter) -> Adapter:
        silent = all(not any(tensor.data) for name, tensor in adapter.items() if name.endswith(".lora_B"))
        self.before = self.before if self.before and silent else adapter
        return self.before


class ReadsBfloat16AsFloat16(Wrapped):
    def loaded(self, adapter: Adapter) -> Adapter:
        made: dict[str, Tensor] = {}
        for name, tensor in adapter.items():
            if tensor.dtype == "BF16":
                halves = torch.frombuffer(bytearray(tensor.data), dtype=torch.float16).reshape(tensor.shape)
                made |= to_adapter({name: halves})
            else:
                made[name] = tensor
        return made


class KeepsTheOldCache(Wrapped):
    """A prefix cache that does not know versions: a prompt seen before is answered as it was then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[tuple[int, ...], list[Completion]] = {}

    def greedy(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Completion]:
        rows = self.inner.greedy(prompts, max_new_tokens)
        return [self.seen.setdefault(tuple(prompt), [row])[0] for prompt, row in zip(prompts, rows, strict=True)]


class GoesByTheNumber(Wrapped):
    """Has that version already, it thinks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: dict[int, Adapter] = {}

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        super().load_adapter(version, self.known.setdefault(version, adapter))


class KeepsEveryAdapter(Wrapped):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: list[bytearray] = []

    def loaded(self, adapter: Adapter) -> Adapter:
        self.kept += [bytearray(tensor.data) for tensor in adapter.values()]
        return adapter


class NamesTheOldAdapter(Wrapped):
    def load_adapter(self, version: int, adapter: Adapter) -> None:
        self.inner.load_adapter(version, adapter)
        self.digest = self.digest or adapter_digest(adapter)


# --- log-probabilities and draws


def shifted(row: Completion) -> Completion:
    return dataclasses.replace(row, logprobs=(*row.logprobs[1:], row.logprobs[0]))


class SaysTheNextTokensLogprob(Wrapped):
    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        return shifted(row)


class SaysTheNextTokensLogprobWhenGreedy(Wrapped):
    def greedy(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Completion]:
        return [shifted(row) for row in self.inner.greedy(prompts, max_new_tokens)]


class LeavesTemperatureOut(Wrapped):
    """Log-probabilities at temperature 1, of what was sampled at another."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reference = Reference(load_weights(self.files), self.lora)

    def loaded(self, adapter: Adapter) -> Adapter:
        self.adapter = adapter
        return adapter

    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        (logprobs_T,) = self.reference.logprobs(self.adapter, prompt, [row.token_ids])
        return dataclasses.replace(row, logprobs=tuple(logprobs_T.tolist()))


class SaysBits(Wrapped):
    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        return dataclasses.replace(row, logprobs=tuple(each / math.log(2) for each in row.logprobs))


class SamplesColder(Wrapped):
    """Says the right log-probabilities of draws from another distribution."""

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        colder = Sampling(
            group_size=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            temperature=0.8 * sampling.temperature,
        )
        return self.inner.generate(prompts, colder, seed)


class DrawsAlikeForEveryPrompt(Wrapped):
    """The same seed for each prompt of a call."""

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        made = [self.inner.generate([prompt], sampling, seed) for prompt in prompts]
        return dataclasses.replace(made[0], groups=[each.groups[0] for each in made])


class DrawsAGroupAlike(Wrapped):
    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        made = self.inner.generate(prompts, sampling, seed)
        return dataclasses.replace(made, groups=[[group[0]] * len(group) for group in made.groups])


class IgnoresTheSeed(Wrapped):
    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        return self.inner.generate(prompts, sampling, seed=0)


class DrawsOnFromCallToCall(Wrapped):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = itertools.count()

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        return self.inner.generate(prompts, sampling, seed + next(self.count))


class SamplesWhenGreedy(Wrapped):
    def greedy(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Completion]:
        sampling = Sampling(group_size=2, max_new_tokens=max_new_tokens)
        return [group[0] for group in self.inner.generate(prompts, sampling, seed=0).groups]


class SeesThePadding(Wrapped):
    """Pads on the left with ids that it then reads."""

    def greedy(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Completion]:
        width = max(map(len, prompts))
        pad_id = self.files.tokenizer.pad_id
        return self.inner.greedy([[*[pad_id] * (width - len(p)), *p] for p in prompts], max_new_tokens)


# --- ends and edges


class NeverStops(Wrapped):
    def __init__(self, build: Build, files: ModelFiles, lora: LoraSpec) -> None:
        super().__init__(build, dataclasses.replace(files, tokenizer=_Endless(files.tokenizer)), lora)


class _Endless:
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, inner: Any) -> None:
        self.pad_id, self.vocab_size = inner.pad_id, inner.vocab_size


class KnowsOnlyOneEnd(Wrapped):
    def __init__(self, build: Build, files: ModelFiles, lora: LoraSpec) -> None:
        tokenizer = _Endless(files.tokenizer)
        tokenizer.eos_ids = frozenset({min(files.tokenizer.eos_ids)})
        super().__init__(build, dataclasses.replace(files, tokenizer=tokenizer), lora)


class CutsTheEndOff(Wrapped):
    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        return dataclasses.replace(row, token_ids=row.token_ids[:-1], logprobs=row.logprobs[:-1])


class SaysStopForAll(Wrapped):
    def said(self, row: Completion, prompt: Ids, sampling: Sampling) -> Completion:
        return dataclasses.replace(row, finish="stop")


class GeneratesOneMore(Wrapped):
    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        one_more = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens + 1)
        return self.inner.generate(prompts, one_more, seed)


class LosesAPrompt(Wrapped):
    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        return self.inner.generate(prompts[1:] or prompts, sampling, seed)


class ContinuesNothing(Wrapped):
    """Takes an empty prompt for one of padding."""

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        return self.inner.generate([prompt or [self.files.tokenizer.pad_id] for prompt in prompts], sampling, seed)


class BeginsWithTheBase(Wrapped):
    """Generates before any adapter came."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.inner.load_adapter(0, Reference(load_weights(self.files), self.lora).adapter(seed=0, gain=0.0))


class SamplesFromNothing(Wrapped):
    """Answers with zeros where there is no distribution."""

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        try:
            return self.inner.generate(prompts, sampling, seed)
        except PeerFault:
            row = Completion((0,) * sampling.max_new_tokens, (0.0,) * sampling.max_new_tokens, "length")
            return Generation(0, self.digest, [[row] * sampling.group_size for _ in prompts])


class StaysSpoilt(Wrapped):
    """What was not finite once is left in its caches."""

    spoilt = False

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        if self.spoilt:
            raise PeerFault("adapter gives no probabilities")
        try:
            return self.inner.generate(prompts, sampling, seed)
        except PeerFault:
            self.spoilt = True
            raise


# --- while it generates


class LoadsInTheMiddle(Wrapped):
    """A version counts at once: what is under way goes on with it, and says its old one."""

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        digest = self.digest
        head = self.inner.generate(prompts[:1], sampling, seed)
        tails = [self.inner.generate([prompt], sampling, seed + i).groups[0] for i, prompt in enumerate(prompts[1:], 1)]
        return Generation(head.version, digest, [*head.groups, *tails])


class SaysTheNewest(Wrapped):
    """Names the version that is the newest when a call ends."""

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        super().load_adapter(version, adapter)
        self.version = version

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        made = super().generate(prompts, sampling, seed)
        return dataclasses.replace(made, version=self.version)


class LoadsWhenIdle(Wrapped):
    """A version waits for the call that is under way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.Lock()

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        with self.lock:
            super().load_adapter(version, adapter)

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        with self.lock:
            return super().generate(prompts, sampling, seed)


class StopsWhenIdle(Wrapped):
    """Generates to the end first."""

    stopped = False

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        if self.stopped:
            raise CancelledError
        return self.inner.generate(prompts, sampling, seed)

    def stop(self) -> None:
        self.stopped = True


class StopsOnce(Wrapped):
    """Can be used again after it was stopped."""

    stopped = False

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        if self.stopped:
            return Generation(0, b"", [])
        return self.inner.generate(prompts, sampling, seed)

    def stop(self) -> None:
        self.stopped = True
        self.inner.stop()


FAULTS: Mapping[type[Wrapped], tuple[str, str]] = {
    IgnoresTheAdapter: ("greedy_agrees", "below the best|difference to the trainer"),
    ScalesTwice: ("logprobs_agree", "difference to the trainer"),
    ForgetsTheRank: ("the_scale_is_alpha_over_r", "difference to the trainer"),
    ScalesByTheRootOfTheRank: ("the_scale_is_alpha_over_r", "difference to the trainer"),
    IgnoresAlpha: ("the_scale_is_alpha_over_r", "alpha 4 over r 8"),
    ForgetsAModule: ("every_module_is_adapted", "nothing but model.layers.0.self_attn.q_proj"),
    TakesUnknownNames: ("an_adapter_that_does_not_fit_is_refused", "takes an adapter with"),
    TakesZerosForNothing: ("a_fresh_adapter_is_the_base_model", "a fresh adapter"),
    ReadsBfloat16AsFloat16: ("bfloat16_adapters_are_applied", "a bfloat16 adapter"),
    KeepsTheOldCache: ("a_swap_leaves_no_trace", "after a swap"),
    GoesByTheNumber: ("a_number_that_comes_again_brings_its_own_adapter", "a number that comes again"),
    KeepsEveryAdapter: ("many_swaps_take_no_memory", "of an adapter behind"),
    NamesTheOldAdapter: ("a_call_ends_under_the_version_it_began_with", "names another adapter"),
    SaysTheNextTokensLogprob: ("logprobs_agree", "difference to the trainer"),
    SaysTheNextTokensLogprobWhenGreedy: ("greedy_agrees", "greedy: mean difference"),
    LeavesTemperatureOut: ("temperature_enters_the_logprobs", "temperature 0.6: mean difference"),
    SaysBits: ("logprobs_agree", "difference to the trainer"),
    SamplesColder: ("samples_follow_the_distribution", "chi-square"),
    DrawsAlikeForEveryPrompt: ("samples_follow_the_distribution", "same draws"),
    DrawsAGroupAlike: ("seeds_decide", "are the same"),
    IgnoresTheSeed: ("seeds_decide", "another seed gives the same"),
    DrawsOnFromCallToCall: ("seeds_decide", "same seed gives other"),
    SamplesWhenGreedy: ("greedy_agrees", "below the best"),
    SeesThePadding: ("a_batch_answers_like_its_prompts_alone", "differ"),
    NeverStops: ("completions_end_where_they_should", "goes on after an end"),
    KnowsOnlyOneEnd: ("completions_end_where_they_should", "goes on after an end|says length"),
    CutsTheEndOff: ("completions_end_where_they_should", "0 tokens|says stop|without an end"),
    SaysStopForAll: ("completions_end_where_they_should", "says stop where"),
    GeneratesOneMore: ("completions_end_where_they_should", "tokens where 1 to"),
    LosesAPrompt: ("completions_end_where_they_should", "groups of"),
    ContinuesNothing: ("what_cannot_be_asked_is_refused", "a prompt without tokens"),
    BeginsWithTheBase: ("nothing_is_generated_before_the_first_adapter", "before the first adapter"),
    SamplesFromNothing: ("an_adapter_without_probabilities_is_a_peers_fault", "from no distribution"),
    StaysSpoilt: ("an_adapter_without_probabilities_is_a_peers_fault", "spoils the next one"),
    LoadsInTheMiddle: ("a_call_ends_under_the_version_it_began_with", "while others came"),
    SaysTheNewest: ("a_call_ends_under_the_version_it_began_with", "says version"),
    LoadsWhenIdle: ("a_call_ends_under_the_version_it_began_with", "when the call before it has ended"),
    StopsWhenIdle: ("a_stop_ends_what_is_under_way", "generates to the end"),
    StopsOnce: ("a_stop_ends_what_is_under_way", "after it was stopped"),
}
"""Each fault, the check that must find it, and what the check then says."""


def broken(fault: type[Wrapped], build: Build) -> Build:
    """Builds engines with this fault."""

    def build_broken(files: ModelFiles, lora: LoraSpec) -> Engine:
        return fault(build, files, lora)

    return build_broken
