"""`swarm doctor`: what it finds, what it says of it, and that it breaks at nothing and leaves nothing behind.

The ten broken situations of a volunteer are in tests/broken_situations.py: here both commands run in this process,
which has paid for its imports; `make slow` runs them as people type them.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from bootstrap import doctor, doctor_command
from bootstrap.main import app
from tests.broken_situations import SITUATIONS, Situation, Stage, options_of, staged, typed, verify
from tests.terminals import Terminals


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path_factory.mktemp("stage"))
    yield terminals
    terminals.close()


@pytest.fixture(scope="module")
def stage(terminals: Terminals) -> Iterator[Stage]:
    with staged(terminals.folder, terminals) as stage:
        yield stage


def swarm(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="swarm")


def no_exit(code: int) -> None:
    raise AssertionError(f"a thread hangs; exit code {code}")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> pytest.MonkeyPatch:
    """Commands in this process see the hub's settings as if they had been in its environment."""
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "IMPORTS", ())  # torch is imported here already; once more takes seconds
    monkeypatch.setattr(os, "_exit", no_exit)
    for checks in ("MACHINE", "RUN", "REST"):  # the machine that runs the tests may be busy
        patient = tuple(replace(check, limit_s=60.0) for check in getattr(doctor_command, checks))
        monkeypatch.setattr(doctor_command, checks, patient)
    monkeypatch.setattr(doctor_command, "TOTAL_S", 200.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(stage.folder / "cache"))
    return monkeypatch


def settle(here: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    from huggingface_hub import constants

    here.setattr(constants, "HF_HUB_OFFLINE", environment["HF_HUB_OFFLINE"] == "1")
    if "HF_ENDPOINT" in environment:
        here.setattr(constants, "ENDPOINT", environment["HF_ENDPOINT"])


@pytest.mark.network
@pytest.mark.parametrize("situation", SITUATIONS, ids=[each.name for each in SITUATIONS])
def test_what_doctor_and_join_say_of_a_broken_situation(
    stage: Stage, here: pytest.MonkeyPatch, situation: Situation
) -> None:
    if situation.name == "no space" and stage.disk is None:
        pytest.skip("no file system of its own here")
    settle(here, dict(situation.environment(stage)))
    said = {command: swarm(command, *options_of(situation, stage)) for command in ("doctor", "join")}
    verify(situation, *((result.exit_code, result.output) for result in said.values()))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("situation", SITUATIONS, ids=[each.name for each in SITUATIONS])
def test_what_people_read_in_a_broken_situation(stage: Stage, terminals: Terminals, situation: Situation) -> None:
    if situation.name == "no space" and stage.disk is None:
        pytest.skip("no file system of its own here")
    verify(situation, *(typed(terminals, command, situation, stage) for command in ("doctor", "join")))
