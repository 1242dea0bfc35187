// The panel to try a model: chat as it is written, the cosine of two texts, a list by relevance.

import { startChat } from "./chat.js";
import { call } from "./gateway.js";
import { find, list, make } from "./elements.js";
import { integer, percent, seconds } from "./readings.js";

const KINDS = { chat: ["chat"], embed: ["embedding"], rerank: ["rerank", "embedding"] };
const tabs = [...document.querySelectorAll("#try-it [role=tab]")];
const form = (name) => document.getElementById(name);

function choose(tab) {
  for (const each of tabs) {
    const isChosen = each === tab;
    each.setAttribute("aria-selected", isChosen);
    each.tabIndex = isChosen ? 0 : -1;
    form(each.getAttribute("aria-controls")).hidden = !isChosen;
  }
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", ({ key }) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
}
choose(tabs[0]);

const [wide, WIDE] = [find("#wide"), "mlx-gateway.wide"];

function widen(isWide) {
  find("main").classList.toggle("wide-panel", isWide);
  wide.setAttribute("aria-pressed", isWide);
  sessionStorage.setItem(WIDE, isWide);
}

wide.addEventListener("click", () => widen(wide.getAttribute("aria-pressed") !== "true"));
widen(sessionStorage.getItem(WIDE) === "true");

/** Offer the models of each sample to the three forms; a choice stays as long as its model does. */
export function offerModels(models, mostBytes) {
  for (const [name, kinds] of Object.entries(KINDS)) {
    const fitting = kinds.flatMap((kind) => models.filter((each) => each.kind === kind));
    const loadedFirst = [...fitting].sort((a, b) => (b.state === "loaded") - (a.state === "loaded"));
    const select = form(name).elements.model;
    const before = select.value;
    const items = select.options.length ? fitting : loadedFirst; // the order stays while one chooses
    const shown = items.length ? items : [{ id: "", state: "no model of this kind" }];
    list(select, shown, (each) => each.id, ({ id }) => make("option", { value: id }), (option, { id, state, input_modalities }) => {
      const text = state === "loaded" ? id : `${id} (${state})`;
      if (option.text !== text) option.text = text;
      option.dataset.state = state;
      option.dataset.sees = input_modalities?.includes("image") ?? false;
    });
    if (!before && loadedFirst.length) select.value = loadedFirst[0].id;
    find("button[type=submit]", form(name)).disabled = !fitting.length;
  }
  pictures.offer(mostBytes);
}

/** Run what a form asks for: its button waits meanwhile, and an error is shown where results are. */
async function run(name, work) {
  const own = form(name);
  const [result, submit] = [".result", "button[type=submit]"].map((each) => find(each, own));
  own.dataset.busy = submit.ariaDisabled = true; // `disabled` would take the focus from it
  result.classList.remove("wrong");
  const state = own.elements.model.selectedOptions[0]?.dataset.state;
  result.replaceChildren(["loading", "unloaded"].includes(state) ? "Loading the model first …" : "");
  const started = performance.now();
  try {
    await work(result, () => (performance.now() - started) / 1000);
  } catch (error) {
    result.classList.add("wrong");
    result.replaceChildren(error.status === 401 ? "This needs an API key of the gateway: enter it under Keys." : error.message);
  } finally {
    own.dataset.busy = submit.ariaDisabled = false;
  }
}

const on = (name, work) =>
  form(name).addEventListener("submit", (event) => {
    event.preventDefault();
    if (form(name).dataset.busy !== "true") run(name, work);
  });

// ── Chat ─────────────────────────────────────────────────────────────────────────────────────────

const pictures = startChat(form("chat"), (work) => on("chat", work));

// ── Embed and rerank ─────────────────────────────────────────────────────────────────────────────

on("embed", async (result, elapsed) => {
  const { model, one, other } = form("embed").elements;
  const body = { model: model.value, input: [one.value, other.value] };
  const { data } = await (await call("v1/embeddings", { body })).json();
  const [a, b] = data.map((each) => each.embedding);
  const dot = (x, y) => x.reduce((sum, each, index) => sum + each * y[index], 0);
  const cosine = dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
  result.replaceChildren(
    make("div", { class: "figure" }, cosine.toFixed(3)),
    make("div", { class: "quiet" }, `cosine similarity · ${integer(a.length)} dimensions · ${seconds(elapsed())}`),
  );
});

on("rerank", async (result) => {
  const { model, query, documents } = form("rerank").elements;
  const texts = documents.value.split("\n").filter((line) => line.trim());
  const body = { model: model.value, query: query.value, documents: texts };
  const { results } = await (await call("v1/rerank", { body })).json();
  const items = results.map(({ index, relevance_score: score }) => {
    const bar = make("i");
    bar.style.width = percent(score).replace(" ", "");
    const share = make("b", { title: String(score) }, score.toFixed(3));
    return make("li", {}, make("span", {}, texts[index]), share, make("span", { class: "meter" }, bar));
  });
  result.replaceChildren(make("ol", { class: "ranking" }, ...items));
});
