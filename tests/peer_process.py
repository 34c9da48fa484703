"""One peer as a process of its own, for end-to-end tests: `python -m tests.peer_process ROLE FOLDER ...`.

--crash POINT:STEP   (trainer) SIGKILL ourselves at an awkward moment of that step:
    after-step         the optimizer has stepped, nothing is on disk
    after-checkpoint   the checkpoint is whole, the transaction has not begun
    while-writing      the checkpoint is whole, half of the version's first blob is on disk
    after-blobs        the version can be had, the transaction has not begun
    before-ledger      the transaction is committed, the ledger file has not got its entry
    before-announce    everything is on disk, nobody has been told
--slow SECONDS        (inference) each token takes that much longer; "generating" is printed when a call begins
--stop-at-load N      (inference) SIGSTOP ourselves while version N is loaded

Signals mean what they mean to `swarm`: the first ends the peer in good order, the second at once.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bootstrap.main import _run_to_end
from protocols.envelopes import Sealed, seal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import public_bytes, run_id_of
from protocols.manifest import CoordinationSpec, EnvironmentSpec, LearningSpec, Manifest, ModelSpec, TransferSpec
from protocols.messages import Sampling
from swarm.identity import load_identity

OWNER = Ed25519PrivateKey.from_private_bytes(b"an owner's key for tests only...")
RUN = run_id_of("test", public_bytes(OWNER))


def make_manifest(folder: Path, arguments: argparse.Namespace) -> Callable[[ModelSpec, int], Sealed[Manifest]]:
    trainer, _ = load_identity(folder / "trainer" / "peer.key")
    coordinators = [load_identity(folder / name / "peer.key")[0].peer_id for name in arguments.coordinator]
    coordination = CoordinationSpec(mode=arguments.mode, lease_s=arguments.lease, coordinators=tuple(coordinators))

    def make(model: ModelSpec, revision: int) -> Sealed[Manifest]:
        manifest = Manifest(
            run=RUN,
            revision=revision,
            trainers=(trainer.peer_id,),
            issued_ms=int(time.time() * 1000),
            max_steps=arguments.steps,
            max_lag=arguments.max_lag,
            model=model,
            environment=EnvironmentSpec(
                prompt="{expression}=", params={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
            ),
            sampling=Sampling(group_size=4),
            learning=LearningSpec(batch_groups=arguments.batch, learning_rate=arguments.learning_rate),
            coordination=coordination,
            transfer=TransferSpec(codec=arguments.codec),
        )
        return seal(OWNER, manifest)

    return make


def cut(path: Path) -> bool:
    """Halve a blob that is being written; False for any other file."""
    if path.parent.name != "blobs":
        return False
    os.truncate(path, path.stat().st_size // 2)
    return True


def kill_ourselves() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def install_crash(point: str, step: int) -> None:
    from peers.checkpoints import Checkpoints
    from peers.record import Record
    from peers.trainer import Trainer

    def before(owner: Any, name: str, due: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            if due(self, *args):
                kill_ourselves()
            return real(self, *args, **kwargs)

        setattr(owner, name, replaced)

    def after_write(self: Checkpoints, at: int, state: bytes) -> tuple[str, bytes]:
        result = real_write(self, at, state)
        if at == step:
            kill_ourselves()
        return result

    real_write = Checkpoints.write
    match point:
        case "after-step":
            before(Trainer, "_commit", lambda trainer, *_: trainer.learner.steps == step)
        case "after-checkpoint":
            Checkpoints.write = after_write  # type: ignore[method-assign]
        case "while-writing":
            written: list[int] = []
            before(Checkpoints, "write", lambda _, at, state: written.append(at))
            before(Path, "replace", lambda path, *_: written[-1:] == [step] and cut(path))
        case "after-blobs":
            before(Record, "announcement", lambda record, chain, version, *_: version == step)
        case "before-ledger":
            committed: list[int] = []
            before(Record, "append", lambda *_: len(committed) > 0)
            real_settle = Trainer._extend

            def count(self: Trainer, sealed: Any) -> None:
                if sealed.message.version == step - 1:
                    committed.append(step)
                real_settle(self, sealed)

            Trainer._extend = count  # type: ignore[method-assign]
        case "before-announce":
            before(Trainer, "_announce", lambda _, sealed: sealed is not None and sealed.message.version == step)
        case _:
            raise SystemExit(f"unknown crash point {point}")


def install_slowness(token_s: float) -> None:
    """Each token that is generated under an adapter takes that much longer; say so when a call begins."""
    from peers.engines.transformers_engine import TransformersEngine, _Draw

    generate, draw, load = TransformersEngine.generate, _Draw.__call__, TransformersEngine.load_adapter
    slow: list[bool] = []
    loads = 0

    def count_loads(self: TransformersEngine, *arguments: Any) -> None:
        nonlocal loads
        loads += 1
        load(self, *arguments)

    def generate_loudly(self: TransformersEngine, *arguments: Any, **named: Any) -> Any:
        slow[:] = [True] * (loads > 1)  # not while its speed is measured at the start, under an adapter of zeros
        print("generating", flush=True)
        return generate(self, *arguments, **named)

    def draw_slowly(self: _Draw, logits: Any) -> Any:
        time.sleep(token_s if slow else 0.0)
        return draw(self, logits)

    TransformersEngine.load_adapter = count_loads  # type: ignore[method-assign]
    TransformersEngine.generate = generate_loudly  # type: ignore[method-assign]
    _Draw.__call__ = draw_slowly  # type: ignore[method-assign]


def install_stop(version: int) -> None:
    """SIGSTOP ourselves in the middle of loading this version."""
    from peers.engines.transformers_engine import TransformersEngine

    load = TransformersEngine.load_adapter

    def stop_and_load(self: TransformersEngine, loaded: int, adapter: Any) -> None:
        if loaded == version:
            os.kill(os.getpid(), signal.SIGSTOP)
        load(self, loaded, adapter)

    TransformersEngine.load_adapter = stop_and_load  # type: ignore[method-assign]


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    listen = (f"/ip4/127.0.0.1/tcp/{arguments.port}",)
    bootstrap = tuple(arguments.bootstrap)

    def ready(addresses: list[str]) -> None:
        print("ready", addresses[0], flush=True)

    match arguments.role:
        case "bootstrap":
            from bootstrap.bootstrap_peer import BootstrapOptions, run_bootstrap

            home = folder / (arguments.home or "bootstrap")
            await run_bootstrap(BootstrapOptions(home=home, runs=(RUN,), bootstrap=bootstrap, listen=listen), ready)
        case "trainer":
            from peers.trainer import TrainerOptions, run_trainer

            options = TrainerOptions(
                home=folder / (arguments.home or "trainer"),
                run=RUN,
                model="builtin",
                make_manifest=make_manifest(folder, arguments),
                bootstrap=bootstrap,
                listen=listen,
                evaluation_problems=0,
            )
            await run_trainer(options, ready)
        case name:
            from peers.inference import InferenceOptions, run_inference

            if arguments.slow:
                install_slowness(arguments.slow)
            if arguments.stop_at_load is not None:
                install_stop(arguments.stop_at_load)
            home = folder / (arguments.home or name)
            peer = InferenceOptions(
                home=home, run=RUN, bootstrap=bootstrap, listen=listen, patience_s=arguments.patience
            )
            await run_inference(peer, ready)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--port", default="0")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--coordinator", action="append", default=[], metavar="HOME")
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--stop-at-load", type=int)
    parser.add_argument("--home")
    parser.add_argument("--crash")
    arguments = parser.parse_args()
    if arguments.crash:
        point, step = arguments.crash.split(":")
        install_crash(point, int(step))
    try:
        _run_to_end(lambda: run(arguments, arguments.folder))
    except typer.Exit as ended:
        return ended.exit_code
    except (TransportFault, PeerFault, ValueError) as error:
        print(f"error {getattr(error, 'code', 'configuration')} {error}", flush=True)
        return 1 if isinstance(error, TransportFault | PeerFault) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
