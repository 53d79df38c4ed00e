"""Run the python snippets of a Markdown page, in order, as one program.

    python tests/helpers/snippets.py docs/capture.md

Fenced blocks marked ``python`` run in one namespace, so a later one may use what an earlier one made.
``await`` may stand at the top, as in a notebook. A failure's traceback names the page and its line.
"""

import ast
import asyncio
import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```python[^\S\n]*\n(.*?)^```[^\S\n]*$", re.MULTILINE | re.DOTALL)


def snippets(page: str) -> Iterator[tuple[int, str]]:
    """Each python block of a page with the number of its first line."""
    for block in FENCE.finditer(page):
        yield page.count("\n", 0, block.start(1)) + 1, block.group(1)


def run(path: Path) -> int:
    """Run a page; returns how many snippets it has."""
    page = path.read_text()
    # What inspect.getsource and tracebacks read: the page itself, at its own line numbers.
    linecache.cache[str(path)] = (len(page), None, page.splitlines(keepends=True), str(path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(snippets(page))
    with asyncio.Runner() as loop:
        for line, source in blocks:
            padded = "\n" * (line - 1) + source
            code = compile(padded, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, namespace)
            if inspect.iscoroutine(result):
                loop.run(result)
    return len(blocks)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    print(f"{run(page)} snippets of {page.name} ran")
