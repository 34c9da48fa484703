"""From a manifest's EnvironmentSpec to an environment."""

from collections.abc import Container

from peers.environments import Environment
from protocols.manifest import EnvironmentSpec


def load_environment(spec: EnvironmentSpec, allow_code: bool | Container[str] = False) -> Environment:
    """The environment that a manifest names.

    A name with a colon is code of the run's owner. It is imported only where `allow_code` is True or holds
    that name: a volunteer must not run whatever a manifest says. Raises ValueError, in one line.
    """
    if ":" not in spec.name:
        from peers.environments.gym import GymEnvironment

        return GymEnvironment(spec.name, spec.params, spec.prompt)
    allowed = allow_code if isinstance(allow_code, bool) else spec.name in allow_code
    if not allowed:
        raise ValueError(
            f"this run's environment is code of its owner ({spec.name}); "
            f"start with --allow-code {spec.name} if you trust it"
        )
    if spec.params:
        raise ValueError("a module:function environment takes no params; write them into the function")
    from peers.environments.custom import CustomEnvironment

    return CustomEnvironment(spec.name, spec.prompt)
