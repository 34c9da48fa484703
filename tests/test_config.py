"""run.toml: what it accepts, what it says when it does not, and the manifest that comes of it."""

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bootstrap.config import (
    COMMENTS,
    ModelSection,
    RunConfig,
    decode_config,
    load_config,
    render_config,
    to_manifest,
)
from bootstrap.demos import DEMOS
from bootstrap.folder import COORDINATORS_MAX, create_run, open_run
from protocols.directory import check_manifest
from protocols.envelopes import unseal
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.manifest import CoordinationSpec, EnvironmentSpec, LearningSpec, LoraSpec, Manifest, ModelSpec

OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
TRAINER = peer_id_of(bytes(range(32)))
SMALLEST = f'name = "sums"\ntrainers = ["{TRAINER}"]\n'


def test_the_smallest_file_gets_every_default() -> None:
    config = decode_config(SMALLEST, "run.toml")
    assert config == RunConfig(name="sums", trainers=(TRAINER,))
    assert (config.max_lag, config.publish_every, config.sampling.group_size) == (4, 1, 8)


@pytest.mark.parametrize(
    ("addition", "text"),
    [
        ("max_lagg = 3", "Object contains unknown field `max_lagg`"),
        ("[sampling]\nqourum = 3", "Object contains unknown field `qourum` - at `$.sampling`"),
        ("[model]\ndigest = 'x'", "Object contains unknown field `digest` - at `$.model`"),
        ("seed = 'seven'", "Expected `int`, got `str` - at `$.seed`"),
        ("max_lag = -1", "Expected `int` >= 0 - at `$.max_lag`"),
        ("learning.learning_rate = nan", "Expected `float` > 0.0 - at `$.learning.learning_rate`"),
        ("lora.alpha = inf", "lora.alpha must be a finite number, it is inf"),
        ("learning.loss = 'ppo'", "Invalid enum value 'ppo' - at `$.learning.loss`"),
        ("sampling.top_p = 0.8", "top_p, top_k and min_p must stay off"),
        ("publish_every = 6", "publish_every 6 needs max_lag >= 5"),
        ("coordination.mode = 'chaos'", "Invalid enum value 'chaos' - at `$.coordination.mode`"),
        ("coordination.lease = 9", "Object contains unknown field `lease` - at `$.coordination`"),
        ("coordination.lease_s = nan", "Expected `float` > 0.0 - at `$.coordination.lease_s`"),
        ("coordination.refresh_gap = 5", "coordination.refresh_gap 5 is over max_lag 4"),
        (
            "publish_every = 3\ncoordination.mode = 'sequential'",
            "publish_every 3 needs coordination.refresh_gap >= 2 in mode sequential",
        ),
        ("coordination.coordinators = ['x']", "length >= 52 - at `$.coordination.coordinators[0]`"),
        (f"coordination.coordinators = ['{'1' * 52}']", "coordination.coordinators: '1"),
        (f"coordination.coordinators = ['{TRAINER}', '{TRAINER}']", "one peer id stands there twice"),
        ("sampling = { group_size = 64, max_new_tokens = 2048 }", "group_size * max_new_tokens is at most 98304"),
        ("max_lag = 9\npublish_every = 5\nmax_steps = 4", "publish_every = 5 is over max_steps = 4"),
        ("lora.targets = []", "lora.targets: give at least one module name"),
        ("lora.targets = ['q_proj', 'q_proj']", "and each once"),
        ("environment.prompt = 'go'", "environment.prompt has no {question}"),
        ("environment.params = { day = 1979-05-27 }", "environment.params.day: use numbers"),
        ("environment.params = { big = [1, 9223372036854775808] }", "environment.params.big: use numbers"),
        ("evaluation.every = -5", "Expected `int` >= 0 - at `$.evaluation.every`"),
        ("max_steps = ", "line 3"),
        ("[[[", "line 3"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_field(addition: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^run\.toml: ") as caught:
        decode_config(SMALLEST + addition + "\n", "run.toml")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'trainers = ["{TRAINER}"]', "missing required field `name`"),
        ('name = "sums"', "missing required field `trainers`"),
        ('name = "sums"\ntrainers = []', "length >= 1"),
        (SMALLEST.replace("sums", "Sums!"), "name 'Sums!': use lower-case letters"),
        (f'name = "sums"\ntrainers = ["{TRAINER}", "{TRAINER}"]', "one peer id stands there twice"),
        (f'name = "sums"\ntrainers = ["{TRAINER[:-1]}"]', "length >= 52"),
        (f'name = "sums"\ntrainers = ["{"1" * 52}"]', "is not the peer id of an Ed25519 key"),
    ],
)
def test_name_and_trainers_are_checked(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^run\.toml: ") as caught:
        decode_config(text, "run.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(("lease_s", "accepted"), [(5.9, False), (6.0, True), (20.0, True), (600.1, False)])
def test_b50_a_lease_outlives_two_lost_beats(lease_s: float, accepted: bool) -> None:
    text = f"{SMALLEST}[coordination]\nlease_s = {lease_s}\n"
    if accepted:
        assert decode_config(text, "run.toml").coordination.lease_s == lease_s
    else:
        with pytest.raises(ValueError, match=r"^run\.toml: .*lease_s") as caught:
            decode_config(text, "run.toml")
        assert "\n" not in str(caught.value)


def test_a_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(SMALLEST.encode() + b'description = "\xff"\n')
    with pytest.raises(ValueError, match="utf-8"):
        load_config(path)


def test_the_bound_must_leave_room_for_the_publish_period() -> None:
    assert decode_config(SMALLEST + "publish_every = 5\n", "run.toml").publish_every == 5  # max_lag is 4
    assert decode_config(SMALLEST + "max_lag = 0\n", "run.toml").max_lag == 0


def test_fields_have_the_types_that_the_manifest_gives_them() -> None:
    config = {field.name: field for field in msgspec.structs.fields(RunConfig)}
    manifest = {field.name: field for field in msgspec.structs.fields(Manifest)}
    for name in config.keys() & manifest.keys() - {"trainers", "model"}:
        assert msgspec.inspect.type_info(config[name].type) == msgspec.inspect.type_info(manifest[name].type), name
        assert config[name].default == manifest[name].default, name
    assert config.keys() - manifest.keys() == {"name", "network", "evaluation"}
    # Not in the file: made from the owner's key, counted by the trainer, or of a later stage.
    assert manifest.keys() - config.keys() == {"run", "revision", "issued_ms", "protocol", "directory_shards"}


def test_every_field_has_its_comment() -> None:
    paths = []
    for field in msgspec.structs.fields(RunConfig):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None
        if isinstance(default, msgspec.Struct):
            paths += [f"{field.name}.{inner.name}" for inner in msgspec.structs.fields(type(default))]
        else:
            paths.append(field.name)
    assert set(paths) == set(COMMENTS)


def test_a_rendered_file_reads_back_the_same() -> None:
    config = RunConfig(
        name="odd-values",
        trainers=(TRAINER,),
        description='quotes " and \\ and \x7f and\nnewlines, ü',
        environment=EnvironmentSpec(
            name="chain_sum", prompt="{question}\t=", params={"a b": [1, 2.5, True], "deep": {"x": "y"}, "e": {}}
        ),
        lora=LoraSpec(r=4, alpha=8.0),
        learning=LearningSpec(learning_rate=1e-5, mask_truncated=False),
        model=ModelSection(name="owner/model"),
        coordination=CoordinationSpec(
            mode="auto", refresh_gap=2, stale="downweight", lease_s=12.5, coordinators=(TRAINER,)
        ),
    )
    text = render_config(config)
    assert decode_config(text, "run.toml") == config
    assert max(map(len, text.splitlines())) <= 140
    assert "# Groups that one optimizer step consumes. Default: 32\nbatch_groups = 32\n" in text


def test_a_manifest_says_what_the_file_says() -> None:
    config = decode_config(SMALLEST + "seed = 7\nmax_lag = 2\n[sampling]\ntemperature = 0.7\n", "run.toml")
    sealed = to_manifest(config, OWNER, revision=3, issued_ms=1234, model=ModelSpec(digest=b"d" * 32))
    run = run_id_of("sums", public_bytes(OWNER))
    said = check_manifest(sealed.raw, run).message
    assert said == sealed.message == unseal(sealed.raw, Manifest).message
    assert (said.run, said.revision, said.issued_ms, said.trainers) == (run, 3, 1234, (TRAINER,))
    assert (said.seed, said.max_lag, said.sampling.temperature, said.model.digest) == (7, 2, 0.7, b"d" * 32)
    for name in ("description", "max_steps", "publish_every", "environment", "sampling", "lora", "learning"):
        assert getattr(said, name) == getattr(config, name), name


def test_a_manifest_that_could_not_be_published_is_refused_before_it_is_signed() -> None:
    config = decode_config(SMALLEST + f"environment.params = {{ words = '{'x' * 16_000}' }}\n", "run.toml")
    with pytest.raises(ValueError, match=r"^the manifest is \d+ bytes, at most \d+ fit"):
        to_manifest(config, OWNER, 0, 0)
    just = decode_config(SMALLEST + f"environment.params = {{ words = '{'x' * 15_000}' }}\n", "run.toml")
    assert len(to_manifest(just, OWNER, 2**32 - 1, 2**48 - 1).raw) < 16 * 1024


def test_a_new_run_has_its_files_and_its_trainer(tmp_path: Path) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=(), environment=DEMOS["builtin"].environment))
    assert sorted(path.relative_to(run.root).as_posix() for path in run.root.rglob("*")) == [
        ".gitignore",
        "owner.key",
        "run.toml",
        "trainer",
        "trainer/peer.key",
    ]
    assert {path.stat().st_mode & 0o777 for path in run.root.rglob("*.key")} == {0o600}
    again = open_run(run.root)
    assert again.config == run.config == load_config(run.config_path)
    assert again.run == run.run == run_id_of("sums", public_bytes(run.owner.key))
    sealed = again.make_manifest(ModelSpec(), 5)
    assert (sealed.sender, sealed.message.revision) == (run.owner.peer_id, 5)


BOOTSTRAP = [peer_id_of(bytes([number]) * 32) for number in range(3)]


def test_the_trainers_bootstrap_peers_may_be_elected(tmp_path: Path) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=()))
    addresses = [f"/ip4/10.0.0.{number}/tcp/31415/p2p/{peer_id}" for number, peer_id in enumerate(BOOTSTRAP)]
    rsa = "/ip4/10.0.0.9/tcp/31415/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"  # could not sign a lease
    relayed = f"/ip4/10.0.0.9/tcp/1/p2p/{TRAINER}/p2p-circuit/p2p/{BOOTSTRAP[0]}"
    sealed = run.make_manifest(ModelSpec(), 0, [*addresses, rsa, relayed])
    assert sealed.message.coordination.coordinators == tuple(sorted(BOOTSTRAP))
    assert sealed.message.eligible == {*BOOTSTRAP, *run.config.trainers}
    again = run.make_manifest(ModelSpec(), 0, reversed(addresses))
    assert again.message.coordination == sealed.message.coordination  # no new revision for another order
    many = [f"/ip4/10.0.0.1/tcp/1/p2p/{peer_id_of(number.to_bytes(32, 'big'))}" for number in range(65)]
    crowded = run.make_manifest(ModelSpec(), 0, many)
    assert len(crowded.message.coordination.coordinators) == COORDINATORS_MAX == 64
    assert check_manifest(crowded.raw, run.run).message == crowded.message


def test_coordinators_that_the_owner_named_stay(tmp_path: Path) -> None:
    template = RunConfig(name="sums", trainers=(), coordination=CoordinationSpec(coordinators=(TRAINER,), lease_s=20.0))
    run = create_run(tmp_path / "sums", template)
    sealed = run.make_manifest(ModelSpec(), 0, [f"/ip4/10.0.0.1/tcp/31415/p2p/{BOOTSTRAP[0]}"])
    assert sealed.message.coordination == template.coordination


@pytest.mark.parametrize("existing", ["run.toml", "owner.key", "trainer/peer.key"])
def test_nothing_is_overwritten(tmp_path: Path, existing: str) -> None:
    path = tmp_path / existing
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ValueError, match="nothing is overwritten"):
        create_run(tmp_path, RunConfig(name="sums", trainers=()))
    assert path.read_text() == "mine"
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]


def test_values_from_options_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.toml: Expected `int` >= 0 - at `\$.seed`"):
        create_run(tmp_path / "run", RunConfig(name="sums", trainers=(), seed=-1))
    assert not (tmp_path / "run").exists()


def test_a_lost_owner_key_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=()))
    run.owner.path.unlink()
    with pytest.raises(ValueError, match=r"owner\.key is missing"):
        open_run(run.config_path)
    assert not run.owner.path.exists()


def test_the_demo_is_the_task_that_the_built_in_model_was_made_for() -> None:
    from peers.models import train_builtin

    expected = EnvironmentSpec(name=train_builtin.TASK, prompt=train_builtin.PROMPT, params=train_builtin.PARAMS)
    assert expected == DEMOS["builtin"].environment
