"""Where a peer keeps its key and its data: one folder a peer, the same from whatever folder it is started.

Without `--home` it is `<user data folder>/echo-swarm/<role>`, so that one person has one identity a role
(case B08); a trainer's home lies beside its `run.toml`.
"""

from pathlib import Path

from swarm.identity import KEY_FILE
from swarm.metrics import FILE_NAME as METRICS_FILE

__all__ = ["KEY_FILE", "METRICS_FILE", "home_of"]


def home_of(role: str, given: Path | None) -> Path:
    """The absolute home folder of a peer."""
    if given is not None:
        return given.expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("echo-swarm", appauthor=False)) / role
