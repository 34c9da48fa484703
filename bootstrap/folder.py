"""The folder of a run, as `swarm init` makes it.

DIR/run.toml           what the run is (bootstrap/config.py)
DIR/owner.key          whoever has it owns the run: it signs the manifest
DIR/trainer/           home of the run's trainer, with its peer.key
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bootstrap.config import RunConfig, decode_config, load_config, render_config, to_manifest
from bootstrap.home import KEY_FILE
from protocols.envelopes import Sealed
from protocols.faults import PeerFault
from protocols.identity import peer_id_of, public_bytes, public_of, run_id_of
from protocols.manifest import Manifest, ModelSpec
from swarm.identity import Identity, load_identity

COORDINATORS_MAX = 64  # that a manifest may name
_GITIGNORE = "# keys, and what peers keep beside them, are nobody else's business\n*\n!run.toml\n!.gitignore\n"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's files and what is in them."""

    root: Path
    config: RunConfig
    owner: Identity

    @property
    def run(self) -> str:
        """The run id."""
        return run_id_of(self.config.name, public_bytes(self.owner.key))

    @property
    def config_path(self) -> Path:
        """`run.toml`."""
        return self.root / "run.toml"

    @property
    def trainer_home(self) -> Path:
        """Home of the trainer that `swarm init` made."""
        return self.root / "trainer"

    def make_manifest(self, model: ModelSpec, revision: int, bootstrap: Iterable[str] = ()) -> Sealed[Manifest]:
        """The manifest, signed by the owner. Raises ValueError when it is too large to be published.

        Where run.toml names no coordinators, the bootstrap peers at these addresses may be elected.
        """
        issued_ms = int(time.time() * 1000)
        return to_manifest(self.config, self.owner.key, revision, issued_ms, model, peer_ids(bootstrap))


def peer_ids(addresses: Iterable[str]) -> list[str]:
    """The peers at the ends of these multiaddresses, as many as a manifest may name; sorted, so that the order in
    which they are typed makes no new revision. Left out is whoever could not sign a lease: keys other than Ed25519.
    """
    found = {address.rpartition("/p2p/")[2] for address in addresses}
    return sorted(filter(_can_sign, found))[:COORDINATORS_MAX]


def _can_sign(peer_id: str) -> bool:
    try:
        public_of(peer_id)
    except PeerFault:
        return False
    return True


def open_run(path: Path) -> RunFolder:
    """The run of a `run.toml`, or of the folder it lies in. Raises ValueError, or OSError with the file's name."""
    path = path.expanduser().absolute()
    if path.is_dir():
        path = path / "run.toml"
    config = load_config(path)
    owner_path = path.parent / "owner.key"
    if not owner_path.exists():
        raise ValueError(f"{owner_path} is missing: the owner's key lies beside run.toml, as `swarm init` made it")
    return RunFolder(path.parent, config, load_identity(owner_path)[0])


def create_run(root: Path, template: RunConfig) -> RunFolder:
    """Make the folder of a new run. The template's `trainers` stays empty: the new trainer's id goes there.

    Raises ValueError for a template that makes no valid run.toml, and rather than overwrite anything.
    """
    root = root.expanduser().absolute()
    for path in (root / "run.toml", root / "owner.key", root / "trainer" / KEY_FILE):
        if path.exists() or path.is_symlink():
            raise ValueError(f"{path} exists: choose another folder, nothing is overwritten")
    # Values that did not come from a file (options of the command line) are checked as if they had.
    decode_config(render_config(msgspec.structs.replace(template, trainers=(peer_id_of(bytes(32)),))), "run.toml")
    run_id_of(template.name, bytes(32))
    owner, _ = load_identity(root / "owner.key")
    trainer, _ = load_identity(root / "trainer" / KEY_FILE)
    config = msgspec.structs.replace(template, trainers=(trainer.peer_id,))
    (root / "run.toml").write_text(render_config(config), encoding="utf-8")
    (root / ".gitignore").write_text(_GITIGNORE, encoding="utf-8")
    return RunFolder(root, config, owner)
