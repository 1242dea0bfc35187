"""Whatever a model writes becomes a few kinds of elements, in time linear in its length."""

from collections.abc import Iterator
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, HOSTILE, looking

ALLOWED = {
    *("p", "span", "h3", "hr", "blockquote", "ul", "ol", "li", "em", "strong", "del"),
    *("code", "pre", "div", "button", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {"class", "start", "tabindex", "type", "title", "role", "aria-label"}
# `write(text, size)` gives the text to a writer in pieces of that size, each shown at once, and
# returns the element; `random(seed)` is a generator of numbers below 1.
TOOLS = """async () => {
  const { writer } = await import("/dashboard/markdown.js");
  window.requestAnimationFrame = (act) => { act(); return 0; };
  window.write = (text, size = text.length) => {
    const root = document.createElement("div");
    const one = writer(root);
    for (let at = 0; at < text.length; at += size) one.add(text.slice(at, at + size));
    one.end();
    return root;
  };
  window.random = (seed) => () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  window.parts = (root) => [...root.querySelectorAll("*")];
}"""
MARKS = [
    *("*", "**", "***", "_", "__", "~~", "`", "``", "\\", "[", "](", "](x)", ")", "![", "!", "<b>"),
    *("\n", "\n", "\n\n", "\n```\n", "\n```js\n", "\n~~~\n", "\n- ", "\n* ", "\n  - ", "\n1. "),
    *("\n2) ", "\n# ", "\n### ", "\n> ", "\n---\n", "\n|", "|", " | ", "\n|-|-|\n", "\n    ", "\t"),
    *(
        "word",
        "other words",
        "a",
        "é",
        "漢字",
        "🙂",
        "javascript:x()",
        "http://other.test/a",
        HOSTILE,
    ),
    *("<script>x()</script>", "&lt;", "$x$", " ", " ", "long " * 500),
]


CASES: list[tuple[str, str]] = [
    (
        "One.\nTwo.\n\nThree.",
        "<p><span>One.</span><span>Two.</span></p><p><span>Three.</span></p>",
    ),
    (
        "a *b* **c** ***d*** ~~e~~ `f*g*`",
        "<p><span>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e"
        "</del> <code>f*g*</code></span></p>",
    ),
    (
        "**a *b***",
        "<p><span><strong>a <em>b</em></strong></span></p>",
    ),
    (
        "*a **b** c*",
        "<p><span><em>a <strong>b</strong> c</em></span></p>",
    ),
    (
        "2*3*4 and snake_case_name and 2 * 3 * 4",
        "<p><span>2*3*4 and snake_case_name and 2 * 3 * 4</span></p>",
    ),
    (
        "\\*a\\* ``b`c``",
        "<p><span>*a* <code>b`c</code></span></p>",
    ),
    (
        "这是**重点**内容",
        "<p><span>这是<strong>重点</strong>内容</span></p>",
    ),
    (
        "- a\n- b\n  - c\n- d",
        "<ul><li><span>a</span></li><li><span>b</span><ul><li><span>c</span></li></ul>"
        "</li><li><span>d</span></li></ul>",
    ),
    (
        "3. a\n\n4. b",
        '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>',
    ),
    (
        "- a\n  more\n\nEnd",
        "<ul><li><span>a</span><span>more</span></li></ul><p><span>End</span></p>",
    ),
    (
        "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\nEnd",
        '<div class="wide" tabindex="0" role="region" aria-label="A table"><table><thead><tr>'
        "<th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x|y</code></td></tr>"
        "</tbody></table></div><p><span>End</span></p>",
    ),
    (
        "```js\nlet a = 1;\n\n  **b**\n```\nEnd",
        '<div><div><span>js</span></div><pre tabindex="0"><code>let a = 1;\n\n  **b**\n'
        "</code></pre></div><p><span>End</span></p>",
    ),
    (
        "- a\n  ```\n  b\n  ```",
        '<ul><li><span>a</span><div><div><span></span></div><pre tabindex="0"><code>b\n'
        "</code></pre></div></li></ul>",
    ),
    (
        "# A\n> b\n\n---",
        '<h3 class="line level-1">A</h3><blockquote><span>b</span></blockquote><hr>',
    ),
    (
        "[a](http://b.test/c_(d)) [e](e)",
        '<p><span><span class="link">a (http://b.test/c_(d))</span> <span class="link">'
        "e</span></span></p>",
    ),
    (
        "![a](http://b.test/c.png)",
        '<p><span><span class="link">a (http://b.test/c.png)</span></span></p>',
    ),
    (
        "[a](javascript:b())",
        '<p><span><span class="link">a (javascript:b())</span></span></p>',
    ),
    (
        "<img/src=x/onerror=document.title='owned'>",
        "<p><span>&lt;img/src=x/onerror=document.title='owned'&gt;</span></p>",
    ),
    (
        "**open `and",
        "<p><span>**open `and</span></p>",
    ),
]


@pytest.fixture(scope="module")
def page(browser: Any, url: str) -> Iterator[Any]:
    with looking(browser, url, ADMIN) as page:
        page.evaluate(TOOLS)
        yield page


def written(page: Any, text: str) -> str:
    """Return what a text becomes, without the buttons that copy code."""
    markup: str = page.evaluate(
        """(text) => {
            const root = write(text);
            for (const each of root.querySelectorAll("button")) each.remove();
            return root.innerHTML;
        }""",
        text,
    )
    for name in ("line", "code", "head"):
        markup = markup.replace(f' class="{name}"', "")
    return markup


@pytest.mark.parametrize(("text", "markup"), CASES)
def test_markdown_becomes_these_elements(page: Any, text: str, markup: str) -> None:
    assert written(page, text) == markup


def test_any_text_becomes_no_other_elements_and_loses_no_letter(page: Any) -> None:
    """In pieces of any size it becomes the same as at once."""
    problems = page.evaluate(
        """([marks, allowed, attributes]) => {
            const letters = (text) => text.replace(/[^\\p{L}\\p{So}]/gu, "");
            const found = [];
            for (let seed = 1; seed <= 400; seed++) {
                const next = random(seed);
                const below = (most) => Math.floor(next() * most);
                const some = Array.from({ length: 60 }, () => marks[below(marks.length)]);
                const text = some.join("");
                const root = write(text);
                const names = parts(root).map((each) => each.localName);
                const given = parts(root).flatMap((each) => each.getAttributeNames());
                const others = names.filter((each) => !allowed.includes(each));
                const strange = given.filter((each) => !attributes.includes(each));
                const inPieces = write(text, 1 + below(40));
                if (others.length || strange.length) found.push([seed, others, strange]);
                if (inPieces.innerHTML !== root.innerHTML) found.push([seed, "in pieces", text]);
                for (const each of root.querySelectorAll("button")) each.remove();
                const shown = root.textContent;
                if (letters(shown) !== letters(text)) found.push([seed, "letters", text, shown]);
            }
            return found.slice(0, 3);
        }""",
        [MARKS, sorted(ALLOWED), sorted(ATTRIBUTES)],
    )  # fmt: skip
    assert problems == []


@pytest.mark.parametrize("end", ["\n\n", "\n", " ", ""], ids=["blocks", "lines", "words", "one"])
def test_a_growing_answer_is_made_once_but_for_its_last_line(page: Any, end: str) -> None:
    """Twice the text is twice the work: what is made in all is bounded by the pieces' number."""
    text = f"- some **bold** words{end}"
    made = page.evaluate(
        """([text, counts]) => counts.map((count) => {
            const make = document.createTextNode.bind(document);
            let made = 0;
            const root = document.createElement("div");
            const watch = new MutationObserver(() => {});
            watch.observe(root, { childList: true, subtree: true });
            const whole = text.repeat(count);
            return import("/dashboard/markdown.js").then(({ writer }) => {
                const one = writer(root);
                for (let at = 0; at < whole.length; at += 8) {
                    one.add(whole.slice(at, at + 8));
                    for (const { addedNodes } of watch.takeRecords())
                        for (const node of addedNodes) made += node.textContent.length;
                }
                one.end();
                return made;
            });
        }).reduce(async (all, each) => [...(await all), await each], [])""",
        [text, [400, 800]],
    )
    assert 0 < made[1] < 2.2 * made[0]


@pytest.mark.parametrize(
    "unit",
    [
        *("`", "*", "**a ", "_a ", "[", "[](", "![a](", "~~a", "\\", "> ", "- ", "  - ", "|", "|-"),
        *("\n- a", "\n```\n", "`a``b", "*a_b", "<img src=x onerror=x()>", "🙂", " ", "\t", "#"),
        *("1. ", "\n> a"),
    ],
)
def test_a_megabyte_of_marks_is_made(page: Any, unit: str) -> None:
    """A reader that searched to the end for each mark would not end within the test."""
    depth, others = page.evaluate(
        """([unit, allowed]) => {
            const root = write(unit.repeat(1_000_000 / unit.length), 65_536);
            let depth = 0;
            for (let part = root; part; part = part.lastElementChild) depth += 1;
            return [depth, parts(root).filter((each) => !allowed.includes(each.localName)).length];
        }""",
        [unit, sorted(ALLOWED)],
    )
    assert depth < 40
    assert others == 0


def test_lists_and_emphasis_are_nested_no_deeper_than_can_be_read(page: Any) -> None:
    lists = "".join(f"{'  ' * depth}- a\n" for depth in range(300))
    emphasis = "".join("*_"[depth % 2] for depth in range(300))
    depths = page.evaluate(
        """(texts) => texts.map((text) => {
            const root = write(text);
            const above = (part) => (part === root ? 0 : 1 + above(part.parentNode));
            return Math.max(...parts(root).map(above));
        })""",
        [lists, f"{emphasis}a{emphasis[::-1]}"],
    )
    assert max(depths) <= 14
