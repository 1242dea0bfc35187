// Elements of the page. Every text is set as text: a name or an error that is markup stays a text.

const SVG = "http://www.w3.org/2000/svg";

/** Return the one element of a selector. */
export const find = (selector, within = document) => within.querySelector(selector);

/** Make an element: `{ class, title, type, … }` are attributes, texts become text nodes. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set an element's text if it differs, so that a selection in it is not lost each second. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

/** Make a button that keeps the focus, but does nothing, while it is at work; `fail` is given its error. */
export function button(text, act, fail, attributes = {}) {
  const made = make("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", async () => {
    if (made.ariaDisabled === "true") return;
    made.ariaDisabled = true;
    try {
      await act();
    } catch (error) {
      fail(error);
    } finally {
      made.ariaDisabled = false;
    }
  });
  return made;
}

/** Make a button that copies a text, which is shown: beyond localhost and TLS, browsers copy a selection only. */
export function copyButton(text, shown, label) {
  const tell = (said) => setTimeout(say, 2000, say(made, said), "Copy");
  const copy = async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else getSelection().selectAllChildren(shown);
    if (!navigator.clipboard && !document.execCommand("copy")) throw new Error("refused");
    tell("Copied");
  };
  const made = button("Copy", copy, () => tell("Not copied"), { title: label, class: "copy" });
  return made;
}

/** Give `take` the files that are pasted into an element or dropped onto it. */
export function onFiles(element, take) {
  element.addEventListener("dragover", (event) => event.preventDefault());
  for (const [name, given] of [["paste", "clipboardData"], ["drop", "dataTransfer"]]) {
    element.addEventListener(name, (event) => {
      const { files, types } = event[given];
      // Office programs put a picture of a copied text beside the text.
      if (!files.length || types.includes("text/plain")) return;
      event.preventDefault();
      take(files);
    });
  }
}

/** Read a file as a `data:` URL. */
export async function dataUrl(file) {
  const reader = new FileReader();
  reader.readAsDataURL(file);
  await new Promise((done, fail) => Object.assign(reader, { onload: done, onerror: () => fail(reader.error) }));
  return reader.result;
}

/**
 * Show one child for each item, in their order. A child is kept as long as its item's key is there:
 * a button must not be replaced between a press and its release.
 */
export function list(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (child) {
      old.delete(name);
    } else {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

/** Fill a row's cells: texts, undefined to leave one. `series` are the names in /metrics of its numbers. */
export function fill(row, texts, series = []) {
  texts.forEach((text, index) => {
    const cell = row.cells[index];
    if (text !== undefined) say(cell, text);
    cell.dataset.label ??= row.closest("table").tHead.rows[0].cells[index].textContent; // seen on a phone
    if (series[index]) cell.dataset.series = series[index];
  });
}

/** Make a sparkline; the function beside it draws points, [age in seconds, y], over a minute at least. */
export function sparkline(attributes = {}) {
  const svg = document.createElementNS(SVG, "svg");
  const [area, stroke] = ["area", "stroke"].map((name) => {
    const line = document.createElementNS(SVG, name === "area" ? "polygon" : "polyline");
    line.setAttribute("class", name);
    svg.append(line);
    return line;
  });
  svg.setAttribute("viewBox", "0 0 1000 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", `sparkline ${attributes.class ?? ""}`);
  svg.setAttribute("aria-hidden", "true");
  const draw = (points, most = 0) => {
    const top = Math.max(most, ...points.map(([, y]) => y)) || 1;
    const spanS = Math.max(60, points[0][0]);
    const x = (age) => (1000 * (1 - age / spanS)).toFixed(1);
    const path = points.map(([age, y]) => `${x(age)},${(97 - (92 * y) / top).toFixed(1)}`);
    stroke.setAttribute("points", path.join(" "));
    area.setAttribute("points", `${x(points[0][0])},100 ${path.join(" ")} ${x(points.at(-1)[0])},100`);
  };
  return [svg, draw];
}
