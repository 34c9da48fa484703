"""Rules that a machine can check (case B98)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("protocols", "swarm", "peers", "bootstrap")  # each may import what stands left of it
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
LINES_MAX = 70

NOT_IN_PROTOCOLS = {"asyncio", "time", "torch", "hivemind", "socket", "sqlite3", "threading", "logging"}
DICE = {"Random"}  # the only name of `random` that rules may use: an argument's type
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module, those inside functions too, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield str(node.module), node.lineno


def long_functions(tree: ast.AST) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"line {node.lineno} {node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= LINES_MAX
    ]


def backward_imports(tree: ast.AST, layer: str) -> list[str]:
    right = (*LAYERS[LAYERS.index(layer) + 1 :], "tests", "benchmarks")
    return [f"line {line} {name}" for name, line in imports(tree) if name.partition(".")[0] in right]


def blind_excepts(tree: ast.AST) -> list[str]:
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    blind = {"Exception", "BaseException"}

    def is_blind(node: ast.ExceptHandler) -> bool:
        types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        caught = any(kind is None or (isinstance(kind, ast.Name) and kind.id in blind) for kind in types)
        return caught and not (node.type is not None and isinstance(node.body[-1], ast.Raise))  # clean up, pass on

    return [f"line {node.lineno}" for node in handlers if is_blind(node)]


def code_from_bytes(tree: ast.AST) -> list[str]:
    """Anything that runs what a peer sent: unpicklers, eval, torch.load, foreign model code."""
    found = [f"line {line} import {name}" for name, line in imports(tree) if name.partition(".")[0] in UNPICKLERS]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        numpy_pickle = any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords)
        if called in FORBIDDEN_CALLS or called == "torch.load" or numpy_pickle:
            found.append(f"line {node.lineno} {called}")
        found += [
            f"line {node.lineno} trust_remote_code={ast.unparse(word.value)}"
            for word in node.keywords
            if word.arg == "trust_remote_code" and ast.unparse(word.value) != "False"
        ]
    return found


def impurities(tree: ast.AST) -> list[str]:
    """In protocols/: I/O, the clock, the dice, the learner."""
    found = [f"line {line} {name}" for name, line in imports(tree) if name.partition(".")[0] in NOT_IN_PROTOCOLS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and node.attr not in DICE:
            found.append(f"line {node.lineno} random.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [f"line {node.lineno} random.{name.name}" for name in node.names if name.name not in DICE]
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append(f"line {node.lineno} async")
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_house_rules(path: Path) -> None:
    tree, layer = parsed(path), path.relative_to(ROOT).parts[0]
    assert long_functions(tree) == []
    assert backward_imports(tree, layer) == []
    assert blind_excepts(tree) == []
    assert layer != "protocols" or impurities(tree) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_b98_nothing_received_can_become_code(path: Path) -> None:
    assert code_from_bytes(parsed(path)) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * LINES_MAX),
        (blind_excepts, "try:\n    f()\nexcept Exception:\n    pass"),
        (blind_excepts, "try:\n    f()\nexcept:\n    raise"),
        (blind_excepts, "try:\n    f()\nexcept (OSError, BaseException) as error:\n    log(error)"),
        (impurities, "import random\nrandom.random()"),
        (impurities, "from random import choice"),
        (impurities, "def f():\n    import time"),
        (impurities, "from torch.nn import Linear"),
        (impurities, "async def f(): ..."),
        (code_from_bytes, "import pickle"),
        (code_from_bytes, "from torch import load\nimport torch\ntorch.load(path)"),
        (code_from_bytes, "eval(text)"),
        (code_from_bytes, "load(name, trust_remote_code=True)"),
        (code_from_bytes, "load(name, trust_remote_code=config.trust)"),
        (code_from_bytes, "np.load(path, allow_pickle=True)"),
        (lambda tree: backward_imports(tree, "swarm"), "import peers.engines"),
        (lambda tree: backward_imports(tree, "protocols"), "from swarm.host import Host"),
    ],
)
def test_each_rule_can_fail(rule, text: str) -> None:  # type: ignore[no-untyped-def]
    assert len(rule(ast.parse(text))) == 1


def test_a_handler_that_cleans_up_and_raises_again_is_no_blind_except() -> None:
    text = "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"
    assert blind_excepts(ast.parse(text)) == []
