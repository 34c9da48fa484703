"""The doctor's look at models and engines: is the run's model here and the same, what computes it, does it fit."""

import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

from bootstrap.doctor import Finding, NotKnown, Patient, ok, problem, size, warning
from bootstrap.errors import one_line

if TYPE_CHECKING:
    from peers.engines.choose import Choice
    from peers.models.base import ModelFiles
    from protocols.manifest import Manifest

HUB_S = 5.0  # as peers/models/hub.py waits


async def check_model(patient: Patient) -> Finding:
    """The run's model is on this machine with the run's digests, or can be had."""
    if patient.options.invite is None:
        return await _check_hub(patient)
    from peers.models.find import find_model, to_download

    spec = (await patient.known_run()).manifest.model
    try:
        num_bytes = await patient.in_thread(to_download, spec.name, spec.revision)
        if num_bytes and not patient.options.fetch:
            found = f"{spec.name}: not on this machine; join would download {size(num_bytes)}"
            return warning(found, "swarm doctor --fetch 'INVITE' downloads it now")
        files = await patient.once("files", lambda: patient.in_thread(find_model, spec.name, spec.revision))
        await patient.in_thread(_compare, files, (await patient.known_run()).manifest)
    except ValueError as error:
        return refused(error, _how_to_get_it())
    return ok(f"{spec.name}: in {files.folder}, weights {files.digest.hex()[:12]} and tokenizer as the run's")


def _how_to_get_it() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"unset HF_HUB_OFFLINE, or copy the model into {constants.HF_HUB_CACHE} from a machine that has it"
    return "ask the run's owner where its model can be had"


def _compare(files: "ModelFiles", manifest: "Manifest") -> None:
    """Raises ValueError, as joining does."""
    from peers.models.find import check_model
    from peers.prompts import Prompts

    check_model(files, manifest.model)
    Prompts(files.tokenizer, manifest.environment, files.name)


async def _check_hub(patient: Patient) -> Finding:
    """Without a run, only whether models could be downloaded."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    here = "without it, only models on this machine can be used, and `builtin`"
    if HF_HUB_OFFLINE:
        return warning("HF_HUB_OFFLINE is set: nothing is downloaded", f"unset it where a model is missing; {here}")
    try:
        await patient.in_thread(_reach, ENDPOINT)
    except OSError as error:
        return warning(f"{ENDPOINT} cannot be reached: {one_line(str(error))}", f"check your network; {here}")
    return ok(f"{ENDPOINT} can be reached")


def _reach(url: str) -> None:
    """Through a proxy where one is set. Raises OSError."""
    with suppress(urllib.error.HTTPError):  # it answers
        urllib.request.urlopen(url, timeout=HUB_S).close()


def refused(error: ValueError, otherwise: str) -> Finding:
    """A refusal of join's as a finding: such texts end in what to do, behind the last colon."""
    found, colon, advice = one_line(str(error)).rpartition(": ")
    return problem(found, advice) if colon else problem(advice, otherwise)


async def check_engine(patient: Patient) -> Finding:
    """The engine and device that would be used, and those that are here."""
    from peers.engines.choose import available

    hardware = await patient.hardware()
    engines = await patient.in_thread(available, hardware)
    here = [f"{name} {found.version}" for name, found in engines.items() if found.version and not found.problem]
    missing = [found.problem for found in engines.values() if found.problem]
    try:
        choice = await _choice(patient)
    except ValueError as error:
        return refused(error, "leave --engine and --device away")
    return ok(
        f"{choice.why}; here: {', '.join(here)}" + (f"; not: {'; '.join(map(one_line, missing))}" if missing else "")
    )


async def _choice(patient: Patient) -> "Choice":
    """Raises ValueError."""
    from peers.engines.choose import choose

    options, hardware = patient.options.engine, await patient.hardware()
    return await patient.once("choice", lambda: patient.in_thread(choose, options.engine, options.device, hardware))


async def check_memory(patient: Patient) -> Finding:
    """The run's model fits, with the rows that would be generated at once."""
    from peers.engines.choose import free_memory, plan

    try:
        choice = await _choice(patient)
    except ValueError as error:
        raise NotKnown("no engine can be used") from error
    options, hardware = patient.options.engine, await patient.hardware()
    files = patient.found("files")
    if files is None:
        free = options.memory_bytes or free_memory(hardware, choice.device)
        if free is None:
            return warning(
                f"how much is free on {choice.device} is unknown", "say how much may be used with --memory GIB"
            )
        return ok(f"{size(free)} for a model on {choice.device}; no model is looked at")
    try:
        planned = await patient.in_thread(plan, options, files, (await patient.known_run()).manifest, hardware)
    except ValueError as error:
        return refused(error, "close other programs, or join a run with a smaller model")
    limit = "an unknown number" if planned.limit is None else size(planned.limit)
    return ok(
        f"{files.name} takes {size(planned.need.total)} of {limit} on {choice.device}, {planned.rows} rows at once"
    )
