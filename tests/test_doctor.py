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
from tests.broken_situations import SITUATIONS, Situation, Stage, options_of, staged
from tests.terminals import Terminals


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    terminals = Terminals(folder)
    try:
        with staged(folder, terminals) as stage:
            yield stage
    finally:
        terminals.close()


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
    said = swarm("doctor", *options_of(situation, stage))
    assert said.exit_code == 1, said.output
    lines = {line.split()[1]: line for line in said.stdout.splitlines()[:-1]}
    line = lines.pop(situation.check)
    assert line.startswith("problem")
    assert all(word in line for word in situation.doctor), line
    assert "; next: " in line
    assert [other for other in lines.values() if other.startswith("problem")] == [], said.output

    joined = swarm("join", *options_of(situation, stage))
    assert joined.exit_code == situation.code, joined.output
    errors = joined.stderr.splitlines()
    assert errors[0].startswith("swarm: ")
    assert all(word in joined.stderr for word in situation.join), joined.stderr
    assert "Traceback" not in joined.output
    if situation.code == 2:
        assert len(errors) == 1
    else:
        assert errors[-1].startswith("  next: ")
