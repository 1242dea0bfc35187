"""Links of the Markdown pages that lead nowhere: to no file, or to no heading of one."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1[ \t]*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`(?:[^`\n]|\n(?!\n))+`")
INLINE = re.compile(r"\]\(([^)]*)\)")
DEFINED = re.compile(r"^ {0,3}\[([^\]\n]+)\]:\s*(\S+)", re.MULTILINE)
REFERENCE = re.compile(r"\[[^\[\]\n]+\]\[([^\[\]\n]+)\]")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
EXPLICIT = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def broken_links(root: Path, pages: Iterable[Path]) -> list[str]:
    """List the links of these pages that lead nowhere, each as `page: link`.

    A link has to lead to a file or folder inside `root`, and its anchor to a heading of that page.
    Web addresses are not asked.
    """
    return [
        f"{page.relative_to(root)}: {link}"
        for page in pages
        for link in links(page.read_text(encoding="utf-8"))
        if not _leads_somewhere(root, page, link)
    ]


def links(text: str) -> Iterator[str]:
    """Yield a page's targets, and each reference whose definition is missing."""
    text = CODE.sub("code", FENCE.sub("", text))
    for inside in INLINE.findall(text):
        target, *_ = inside.split(maxsplit=1) or [""]
        yield target.strip("<>")
    defined = dict(DEFINED.findall(text))
    yield from defined.values()
    names = {name.lower() for name in defined}
    for reference in REFERENCE.finditer(text):
        if reference[1].lower() not in names:
            yield reference[0]


def anchors(text: str) -> set[str]:
    """List the anchors of a page's headings as GitHub makes them, and those that it sets itself."""
    text = FENCE.sub("", text)
    seen: Counter[str] = Counter()
    found = set(EXPLICIT.findall(text))
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def _leads_somewhere(root: Path, page: Path, link: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return True
    if not link or link.startswith(("/", "[")):
        return False
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page.resolve()
    if not target.is_relative_to(root.resolve()) or not target.exists():
        return False
    if "#" not in link:
        return True
    return target.suffix == ".md" and anchor in anchors(target.read_text(encoding="utf-8"))
