"""The commands and code blocks of the pages."""

import re
import shlex
from typing import NamedTuple

from user_commands import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])

FENCE = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"^(?:    .*\n)+", re.M)
INLINE = re.compile(r"`(python -m jaxrl_atari[^`]*)`")
COMMAND = re.compile(r"python -m jaxrl_atari\.([\w.]+)(.*)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


class Case(NamedTuple):
    """A command of a page: `python -m jaxrl_atari.MODULE WORDS`."""

    module: str
    words: tuple[str, ...]


def text(page):
    return page.read_text(encoding="utf-8")


def command_lines(page):
    """The commands of this package on a page."""
    blocks = [code for _, code in FENCE.findall(text(page))] + INDENTED.findall(FENCE.sub("", text(page)))
    lines = INLINE.findall(FENCE.sub("", text(page)))
    for block in blocks:
        lines += block.replace("\\\n", " ").splitlines()
    for line in lines:
        for module, rest in COMMAND.findall(line.partition(" | ")[0]):
            words = shlex.split(re.sub(r"[\[\]]|\.\.\.(?=\s|$)", " ", rest.replace("|", " ")), comments=True)
            yield Case(module, tuple(words))


def examples(page):
    """The commands of a page, each once, with files that exist in place of those of the page."""
    for case in dict.fromkeys(command_lines(page)):
        words = [
            "configs/qbert.py" if word in ("FILE", "my_idea.py") or word.endswith("_best.py") else word
            for word in case.words
        ]
        words = [word.replace("HOST:PORT", "localhost:1234") for word in words]
        if words:
            yield case._replace(words=tuple(words))


CASES = {f"{page.name}-{' '.join([case.module, *case.words])}": case for page in PAGES for case in examples(page)}
