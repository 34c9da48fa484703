"""A chat template, run in a process of its own: it is a program, and it comes from a stranger.

    python template.py < {"template", "messages", "tokens"}     > {"before", "after", "strips_left", "strips_right"}

Jinja's sandbox keeps a template from files and from Python's insides, but not from looping for ever or from filling
the memory. So it runs here, with bounds on both, and only once a run: what comes out is the frame that it puts
around a question, and every prompt of the run is made from that. Who starts it (peers/prompts.py) bounds its time.

Nothing of ours is imported: the process must start fast, and have nothing to give away.
"""

import contextlib
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES_MAX = 512 * 2**20  # Python with Jinja takes 60 MB; a frame is a few kB
CPU_S_MAX = 3  # Python with Jinja starts in 0.1 s; a template renders in milliseconds

_MARK = "echoswarmquestion"  # letters only: nothing that a template would escape
_SPACE = "\t \t"  # tells whether a template strips what it is given

# Some templates show the date of the day, and a prompt must be the same on every machine and every day. This is the
# date that Llama's template shows where it cannot ask for one.
_TODAY = (2024, 7, 26, 0, 0, 0, 4, 208, 0)


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training on it; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def renderer(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> Callable[[str], str]:
    """A function from a question to the whole prompt, with the same names at hand as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    del environment.filters["random"], environment.globals["lipsum"]  # dice: prompts would differ
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    compiled = environment.from_string(template)

    def render(question: str) -> str:
        asked = [*messages, {"role": "user", "content": question}]
        return compiled.render(messages=asked, tools=None, documents=None, add_generation_prompt=True, **tokens)

    return render


def frame(render: Callable[[str], str]) -> dict[str, Any]:
    """What the template puts around a question. Raises ValueError for one that does more than that."""
    before, mark, after = render(f"{_SPACE}{_MARK}{_SPACE}").partition(_MARK)
    if not mark or _MARK in after:
        raise ValueError("it does not show a question exactly once")
    strips_left, strips_right = not before.endswith(_SPACE), not after.startswith(_SPACE)
    found = {
        "before": before if strips_left else before.removesuffix(_SPACE),
        "after": after if strips_right else after.removeprefix(_SPACE),
        "strips_left": strips_left,
        "strips_right": strips_right,
    }
    for question in ("x", " <7> + \"5\" =\n\n& 'so on': {{ 1 }} "):
        shown = question.lstrip() if strips_left else question
        shown = shown.rstrip() if strips_right else shown
        if render(question) != f"{found['before']}{shown}{found['after']}":
            raise ValueError("it does more with a question than to show it")
    return found


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    import time

    return time.strftime(form, _TODAY)


def _limit() -> None:
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES_MAX), (resource.RLIMIT_CPU, CPU_S_MAX)):
        with contextlib.suppress(OSError, ValueError):  # macOS knows no limit of address space
            resource.setrlimit(kind, (most, most))


def main() -> None:
    """Whatever goes wrong ends the process: the last line that it says is the reason."""
    _limit()
    order = json.load(sys.stdin)
    json.dump(frame(renderer(order["template"], order["messages"], order["tokens"])), sys.stdout)


if __name__ == "__main__":
    main()
