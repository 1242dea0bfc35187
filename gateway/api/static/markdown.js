// A model's Markdown as elements: a subset, made line by line, in which every text is set as text.
// A line is made once, when it has ended; the last line, as often as it grows.

import { copyButton, make } from "./elements.js";

const LONGEST = 2000; // characters of a line that are made at once
const DEEPEST = 6; // lists in lists, and emphasis in emphasis
const FENCE = /^(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})(?: +(.*))?$/;
const RULE = /^(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^> ?(.*)$/;
const ITEM = /^([-*+]|(\d{1,9})[.)])(?: +(.*))?$/;
const MARK = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}|~~|!?\[/g;
const LINK = /!?\[([^[\]]*)\]\(([^()\s]*(?:\([^()\s]*\))?)(?: +"[^"]*")?\)/y;
const EMPHASIS = { "*": ["em"], _: ["em"], "**": ["strong"], __: ["strong"], "***": ["em", "strong"], ___: ["em", "strong"], "~~": ["del"] };

const isWordBound = (mark) => mark === "*" || mark[0] === "_"; // so that 2*3*4 and snake_case stay

// ── Within a line ────────────────────────────────────────────────────────────────────────────────

/** Return where the run of marks is that closes one, as [start, end]; null if there is none. */
function closing(text, from, mark) {
  const isEnd = (start, end) => {
    if (mark[0] === "`") return end - start === mark.length;
    // `***` closes what `**` or `*` began: the marks before it are of the text inside.
    const isLong = end - start === mark.length || (end - start === 3 && mark[0] !== "~");
    return isLong && /\S/.test(text[start - 1]) && !(isWordBound(mark) && /\w/.test(text[end] ?? ""));
  };
  for (let start = text.indexOf(mark[0], from); start >= 0; ) {
    let end = start;
    while (text[end] === mark[0]) end += 1;
    if (start > from && isEnd(start, end)) return [end - mark.length, end];
    start = text.indexOf(mark[0], end);
  }
  return null;
}

/** Return a mark's node and where it ends; null if it is only text, undefined if none like it ends. */
function marked(text, start, mark, depth) {
  const inside = start + mark.length;
  if (mark[0] === "\\") return [mark[1], inside];
  if (mark.endsWith("[")) {
    LINK.lastIndex = start;
    const found = LINK.exec(text);
    return found && [link(found[1], found[2], depth), LINK.lastIndex];
  }
  const isOpen = /\S/.test(text[inside] ?? " ") && !(isWordBound(mark) && /\w/.test(text[start - 1] ?? ""));
  if (mark[0] !== "`" && !isOpen) return null;
  const found = closing(text, inside, mark);
  if (!found) return undefined;
  const within = text.slice(inside, found[0]);
  if (mark[0] === "`") return [make("code", {}, within.replace(/^ (.*\S.*) $/, "$1")), found[1]];
  const node = EMPHASIS[mark].reduceRight((children, tag) => [make(tag, {}, ...children)], spans(within, depth + 1))[0];
  return [node, found[1]];
}

/** A link is its text and its address: nothing to follow, and nothing that is fetched. */
function link(label, address, depth) {
  const name = label && label !== address ? [...spans(label, depth + 1), ` (${address})`] : [address];
  return make("span", { class: "link" }, ...name);
}

/** Return the nodes of a text with emphasis, code and links. */
function spans(text, depth = 0) {
  if (depth >= DEEPEST) return [text];
  const [nodes, endless, marks] = [[], new Set(), new RegExp(MARK)];
  let done = 0;
  for (let found = marks.exec(text); found; found = marks.exec(text)) {
    const [mark] = found;
    // Where a mark has no end, no later one of its kind has: a text of marks alone is read once.
    const made = endless.has(mark) ? null : marked(text, found.index, mark, depth);
    if (made === undefined) endless.add(mark);
    if (!made) continue;
    nodes.push(text.slice(done, found.index), made[0]);
    done = marks.lastIndex = made[1];
  }
  return [...nodes, text.slice(done)].filter((node) => node !== "");
}

// ── Lines ────────────────────────────────────────────────────────────────────────────────────────
//
// `at` says what the next line may join: `fence`, the open code; `lists`, the outermost first, each with its
// indent, element and last item; `block`, the paragraph, item or quote; `head`, a line that may be a table's head;
// `body`, of a table; `last`, what a long line goes on in. Functions return the next `at`, a parent and its new child.

const line = (text, tag = "span") => make(tag, { class: "line" }, ...spans(text));
const cells = (text) => text.replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const isRuler = (text) => /^[\s|:-]+$/.test(text) && text.includes("|") && cells(text).every((cell) => /^:?-+:?$/.test(cell));
const row = (texts, tag) => make("tr", {}, ...texts.map((text) => make(tag, {}, ...spans(text))));

function read(at, raw, isWhole) {
  if (at.fence) return readCode(at, raw, isWhole);
  const untabbed = raw.replaceAll("\t", "    ");
  const text = untabbed.trim();
  const indent = untabbed.search(/\S/);
  if (!text) return [{ ...at, block: null, head: null, body: null }];
  const lists = at.lists.filter((list) => list.indent < indent).slice(0, DEEPEST);
  const parent = lists.at(-1)?.item ?? at.root;
  const alone = { root: at.root, lists };
  const [fence, heading, quote, item] = [FENCE, HEADING, QUOTE, ITEM].map((each) => each.exec(text));
  if (fence) return openCode(alone, parent, fence, indent);
  if (RULE.test(text)) return [alone, parent, make("hr")];
  if (item) return readItem(at, lists, parent, item, indent);
  if (heading) {
    const made = make("h3", { class: `line level-${heading[1].length}` }, ...spans(heading[2] ?? ""));
    return [{ ...alone, last: made }, parent, made];
  }
  if (at.body && text.includes("|")) {
    const made = row(cells(text), "td");
    return [{ ...at, last: made.lastChild }, at.body, made];
  }
  if (isWhole && at.head && isRuler(text) && cells(at.head.text).length === cells(text).length) return openTable(at);
  const [tag, words] = quote ? ["blockquote", quote[1]] : ["p", text];
  const made = line(words);
  const isJoined = at.block && (!quote || at.block.localName === "blockquote");
  const block = isJoined ? at.block : make(tag, {}, made);
  const next = { ...(isJoined ? at : alone), block, last: made, body: null, head: quote ? null : { text, made } };
  return isJoined ? [next, block, made] : [next, parent, block];
}

function readItem(at, lists, parent, [, , number, text], indent) {
  const outer = lists.slice(0, DEEPEST - 1);
  const made = make("li", {}, line(text ?? ""));
  const sibling = at.lists[outer.length];
  const tag = number ? "ol" : "ul";
  const isNext = sibling?.element.localName === tag;
  const element = isNext ? sibling.element : make(tag, number > 1 ? { start: number } : {}, made);
  const list = { indent: isNext ? sibling.indent : indent, element, item: made };
  const next = { root: at.root, lists: [...outer, list], block: made, last: made.firstChild };
  return isNext ? [next, element, made] : [next, parent, element];
}

function openCode(at, parent, [, mark, info], indent) {
  const code = make("code");
  const head = make("div", { class: "head" }, make("span", {}, info.trim()), copyButton(() => code.textContent, code, "Copy this code"));
  const made = make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, code));
  return [{ ...at, fence: { mark, indent, code } }, parent, made];
}

function readCode(at, raw, isWhole) {
  const { mark, indent, code } = at.fence;
  const text = raw.trim();
  if (text.length >= mark.length && text === mark[0].repeat(text.length)) return [{ ...at, fence: null, block: null }];
  const margin = Math.max(0, Math.min(indent, raw.search(/\S|$/)));
  return [at, code, document.createTextNode(raw.slice(margin) + (isWhole ? "\n" : ""))];
}

function openTable(at) {
  const { text, made } = at.head;
  const [block, body] = [made.parentNode, make("tbody")];
  const parent = block.localName === "p" ? block.parentNode : block;
  made.remove();
  if (!block.childNodes.length) block.remove();
  const table = make("table", {}, make("thead", {}, row(cells(text), "th")), body);
  const next = { ...at, block: null, head: null, body, last: null };
  return [next, parent, make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "A table" }, table)];
}

/** Go on with a line that is longer than what is made at once. */
function goOn(at, text, isWhole) {
  if (at.fence) return [at, at.fence.code, document.createTextNode(text + (isWhole ? "\n" : ""))];
  return [at, at.last ?? at.root, make("span", {}, ...spans(text))];
}

/**
 * Return a writer into an element: `add` text as it comes, then `end`. Elements change once a frame,
 * inside of `change`, and never before the last line.
 */
export function writer(root, change = (act) => act()) {
  let at = { root, lists: [] };
  let [rest, frame, isCut, preview] = ["", 0, false, null];

  function put(text, isWhole, isKept = true) {
    const [next, parent, node] = (isCut ? goOn : read)(at, text, isWhole);
    if (node) parent.append(node);
    if (isKept) at = next;
    return node;
  }

  /** Make the pieces of a long line that are complete, and return what is left of it. */
  function cut(text) {
    let left = text;
    while (left.length > LONGEST) {
      const size = left.lastIndexOf(" ", LONGEST - 1) + 1 || (left.codePointAt(LONGEST - 1) > 0xffff ? LONGEST - 1 : LONGEST);
      put(left.slice(0, size), false);
      isCut = true;
      left = left.slice(size);
    }
    return left;
  }

  function show() {
    frame = 0;
    preview?.remove();
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const each of lines) {
      put(cut(each), true);
      isCut = false;
    }
    rest = cut(rest);
    preview = rest ? put(rest, false, false) : null;
  }

  return {
    add(text) {
      rest += text;
      frame ||= requestAnimationFrame(() => change(show));
    },
    end() {
      cancelAnimationFrame(frame);
      if (rest) rest += "\n";
      change(show);
    },
  };
}
