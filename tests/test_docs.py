"""The reference in docs/ says what the code does: names, types, defaults, reasons and limits are compared here.

What a table says in words is for people to check; what it says in code is checked against the code, in both
directions, so that a field that is added, renamed or removed fails a test until the page follows.
"""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from bootstrap.config import COMMENTS, RunConfig
from bootstrap.report import About, build_report
from protocols.directory import HEAD_LIFE_S, MANIFEST_LIFE_S, PEER_LIFE_S, RecordKey, RecordKind
from protocols.envelopes import KINDS
from protocols.ledger import Audit
from protocols.manifest import CoordinationSpec
from protocols.messages import Verdict
from swarm.storage import TrainerStore

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LAYERS = ("protocols", "swarm", "peers", "bootstrap")
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if page.exists()]

_HEADING = re.compile(r"^#+ `([^`]+)`(.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# This and other people's machines: a path that means something on one machine only has no place in the repository.
_MACHINE_PATH = re.compile(
    r"(?<![\w./~])/(?:" + "|".join(("wo" + "rk", "tmp/" + "w", "ro" + "ot", "Us" + r"ers/\w")) + r")\b"
)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def cells(line: str) -> list[str]:
    """The cells of a table row; `\\|` is a bar inside one."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def named_rows(text: str) -> list[list[str]]:
    """Table rows whose first cell is one name in code."""
    rows = (cells(line) for line in text.splitlines() if line.startswith("| `"))
    return [[row[0].strip("`"), *row[1:]] for row in rows]


def sections(page: str) -> dict[str, tuple[str, str]]:
    """What stands under each heading that is a name in code: the rest of the heading, and the text."""
    found: dict[str, tuple[str, str]] = {}
    name = None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        heading = _HEADING.match(line)
        if heading:
            name = heading[1]
            assert name not in found, f"{page}: two sections {name}"
            found[name] = (heading[2], "")
        elif line.startswith("#"):
            name = None
        elif name is not None:
            found[name] = (found[name][0], found[name][1] + line + "\n")
    return found


def code_words(page: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text(encoding="utf-8")))


# ---------------------------------------------------------------------- docs/wire.md


def structs(path: Path) -> Iterator[tuple[str, str | None, list[list[str]]]]:
    """Each Struct of a module: name, tag, and (field, type, default) as they stand in the source."""
    for node in parsed(path).body:
        if not (isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Struct" for base in node.bases)):
            continue
        tag = next((ast.literal_eval(word.value) for word in node.keywords if word.arg == "tag"), None)
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        rows = [[ast.unparse(part.target), ast.unparse(part.annotation), _default(part.value)] for part in fields]
        yield node.name, tag, rows


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    factory = isinstance(value, ast.Call) and ast.unparse(value.func) == "msgspec.field"
    return "its defaults" if factory else f"`{ast.unparse(value)}`"


MESSAGES = [*structs(ROOT / "protocols/messages.py"), *structs(ROOT / "protocols/manifest.py")]


def test_every_message_has_a_section_and_every_section_a_message() -> None:
    assert len(MESSAGES) == 42
    assert sorted(sections("wire.md")) == sorted(name for name, _, _ in MESSAGES)


@pytest.mark.parametrize(("name", "tag", "fields"), MESSAGES, ids=[name for name, _, _ in MESSAGES])
def test_wire_says_the_tag_types_and_defaults_of_a_message(name: str, tag: str | None, fields: list[list[str]]) -> None:
    heading, text = sections("wire.md")[name]
    assert re.findall(r"tag `([^`]+)`", heading) == ([tag] if tag else [])
    rows = named_rows(text)
    assert [[row[0], row[1].strip("`"), row[2]] for row in rows] == fields
    assert all(row[3] for row in rows), "a field without a meaning"


def said_reasons() -> set[str]:
    """Every reason that a peer is told or that is counted: literals of PeerFault, Refused and the counters."""
    found: set[str] = set()
    for node in (node for path in SOURCES for node in ast.walk(parsed(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("PeerFault", "Refused") and node.args:
            found |= {each.value for each in ast.walk(node.args[0]) if _is_text(each)}  # type: ignore[attr-defined]
        elif isinstance(node, ast.AugAssign) and re.match(r".*refusals\['", ast.unparse(node.target)):
            found.add(ast.literal_eval(node.target.slice))  # type: ignore[attr-defined]
    return {reason for reason in found if not reason.startswith(" ") and not reason.endswith(" ")}  # f-string parts


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_reason_is_explained() -> None:
    reasons = said_reasons()
    assert {"queue full", "run ended", "inbox full", "no manifest yet", "wrong root"} <= reasons
    assert sorted(reasons - code_words("wire.md") - code_words("files.md")) == []


def wire_rows(width: int) -> list[list[str]]:
    return [row for row in named_rows((DOCS / "wire.md").read_text(encoding="utf-8")) if len(row) == width]


def test_verdicts_are_explained() -> None:
    verdicts = [row[0] for row in wire_rows(3) if row[0] in get_args(Verdict)]
    assert verdicts == list(get_args(Verdict))


def test_envelope_kinds_have_their_limits() -> None:
    kinds = [[kind, f"`{message.__name__}`", f"{bytes_max:,}"] for message, (kind, bytes_max) in KINDS.items()]
    assert [row for row in wire_rows(3) if re.fullmatch(r"`\w+`", row[1])] == kinds


def test_directory_keys_have_their_lifetimes() -> None:
    def key(kind: RecordKind) -> str:
        return RecordKey("<run>", kind).text.replace("/0", "/<shard>")

    lives = {
        RecordKind.MANIFEST: MANIFEST_LIFE_S,
        RecordKind.HEAD: HEAD_LIFE_S,
        RecordKind.PEERS: PEER_LIFE_S,
        RecordKind.COORDINATOR: CoordinationSpec().lease_s,
    }
    assert set(lives) == set(RecordKind)
    told = {row[0]: row[3].partition(" s")[0] for row in wire_rows(6)}
    assert told == {key(kind): f"{life_s:g}" for kind, life_s in lives.items()}


def limits() -> list[list[str]]:
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("wire.md", "files.md", "security.md"))
    return [row for row in named_rows(text) if re.fullmatch(r"(protocols|swarm|peers)(\.\w+)+\.[A-Z_]+", row[0])]


def test_limits_have_the_values_that_the_pages_give() -> None:
    rows = limits()
    for name, value, *_ in rows:
        module, _, constant = name.rpartition(".")
        assert f"{getattr(importlib.import_module(module), constant):,}" == value, name
    assert sorted(rule_limits() - {row[0] for row in rows}) == []


def rule_limits() -> set[str]:
    """Every public limit of protocols/: what another implementation must keep to."""
    return {
        f"protocols.{path.stem}.{target.id}"
        for path in (ROOT / "protocols").glob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z_]*_(MAX|S)", target.id)
    }


# ---------------------------------------------------------------------- docs/metrics.md


def emitted() -> dict[str, set[str]]:
    """Events and their fields, of every call of `metrics.emit`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        tree = parsed(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("metrics.emit"):
                found[ast.literal_eval(node.args[0])] |= _fields(node, tree)
    return dict(found)


def _fields(call: ast.Call, tree: ast.Module) -> set[str]:
    fields = {word.arg for word in call.keywords if word.arg is not None}
    for spread in (ast.unparse(word.value) for word in call.keywords if word.arg is None):
        dicts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == spread
        ]
        assert dicts, f"{spread} is not a dict that this test can read"
        fields |= {key for each in dicts for key in map(ast.literal_eval, each.keys)}  # type: ignore[attr-defined]
    return fields


def test_every_event_and_every_field_of_it_is_described() -> None:
    described = {
        name: {row[0] for row in named_rows(text) if "." not in row[0]}
        for name, (_, text) in sections("metrics.md").items()
    }
    assert described == emitted()


def test_every_warning_is_described() -> None:
    calls = (node for path in SOURCES for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    codes = {
        ast.literal_eval(call.args[0])
        for call in calls
        if ast.unparse(call.func).endswith(".warn") and call.args and _is_text(call.args[0])
    }
    assert {"equivocation", "bad adapter", "waiting for rollouts"} <= codes
    assert sorted(codes - code_words("metrics.md")) == []


# ---------------------------------------------------------------------- docs/report.md


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the leaves of a JSON object; a dictionary with free keys is a leaf when it is empty."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from paths(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def test_every_field_of_the_report_is_described() -> None:
    about = About("r", "async", "builtin", "chain_sum", 0, 4, 100, 1.0)
    with_ledger, without = build_report(about, [], Audit()), build_report(about, [], None)
    assert set(paths(without["audit"])) <= set(paths(with_ledger["audit"]))
    described = [row[0] for row in named_rows((DOCS / "report.md").read_text(encoding="utf-8"))]
    assert described == list(paths(with_ledger))


# ---------------------------------------------------------------------- docs/run-toml.md


def type_text(kind: Any) -> str:
    """A msgspec type for people, with its limits."""
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "integer" if isinstance(kind, msgspec.inspect.IntType) else "number"
            low = f"from {kind.ge:,}" if kind.ge is not None else f"above {kind.gt:,}" if kind.gt is not None else ""
            high = f"to {kind.le:,}" if kind.le is not None else f"below {kind.lt:,}" if kind.lt is not None else ""
            return " ".join(filter(None, (name, low, high)))
        case msgspec.inspect.StrType():
            return f"text of at most {kind.max_length:,} characters" if kind.max_length else "text"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.VarTupleType():
            what = "pairs of texts" if isinstance(kind.item_type, msgspec.inspect.TupleType) else "texts"
            return f"list of {f'at most {kind.max_length} ' if kind.max_length else ''}{what}"
        case msgspec.inspect.LiteralType():
            return " or ".join(f'"{value}"' for value in kind.values)
        case msgspec.inspect.DictType():
            return "table"
        case _:
            raise AssertionError(f"no words for {kind}")


def run_toml_rows() -> list[str]:
    """The table of docs/run-toml.md: one row a field, as the types, their defaults and COMMENTS say."""
    rows = []
    for field, prefix in _leaf_fields(RunConfig, ""):
        path = prefix + field.name
        default = "required" if field.required else f"`{_toml(_default_of(field))}`"
        comment = COMMENTS[path].replace("|", "\\|")
        rows.append(f"| `{path}` | {type_text(field.type)} | {default} | {comment} |")
    return rows


def _leaf_fields(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[Any, str]]:
    for field in msgspec.inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        if isinstance(field.type, msgspec.inspect.StructType):
            yield from _leaf_fields(field.type.cls, f"{prefix}{field.name}.")
        else:
            yield field, prefix


def _default_of(field: Any) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode().replace(",", ", ")  # JSON and TOML agree on all that occurs here


def test_run_toml_page_has_every_field() -> None:
    text = (DOCS / "run-toml.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| `")] == run_toml_rows()


# ---------------------------------------------------------------------- docs/files.md


def test_files_page_has_every_table_and_column() -> None:
    described = {name: {row[0] for row in named_rows(text)} for name, (_, text) in sections("files.md").items()}
    tables = re.findall(r"CREATE TABLE IF NOT EXISTS (\w+) \((.*?)\);", TrainerStore.schema, re.DOTALL)
    columns = {
        name: {part.split()[0] for part in re.split(r",\s*(?![^(]*\))", body) if part.split()[0].islower()}
        for name, body in tables
    }
    assert len(columns) == 6
    assert {name: described.get(name) for name in columns} == columns


# ---------------------------------------------------------------------- every page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in _LINK.findall(text) if not link.startswith(("http://", "https://", "mailto:"))]
    for link in links:
        target, _, anchor = link.partition("#")
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name} links to {link}"
        if anchor and file.suffix == ".md":
            assert anchor in set(anchors(file)), f"{page.name} links to {link}"


def anchors(page: Path) -> Iterator[str]:
    """The anchors that GitHub gives to the headings of a page."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            yield re.sub(r"[^\w\- ]", "", title).replace(" ", "-")


def repository_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".json"]
    folders = (*LAYERS, "tests", "docs", "benchmarks", ".ci")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in top + inside if path.suffix not in (".pyc", ".safetensors", ".png")]


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if _MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see /wo" + "rk/main/x.py", True),
        ("/tmp/" + "w/a.py", True),
        ("frame/wo" + "rk", False),
        ("a /wor" + "king", False),
    ],
)
def test_the_rule_for_paths_can_fail(text: str, found: bool) -> None:
    assert bool(_MACHINE_PATH.search(text)) is found
