// The panel to try a model: chat as it is written, the cosine of two texts, a list by relevance.

import { call, events } from "./gateway.js";
import { find, list, make, say } from "./elements.js";
import { picture, takePictures } from "./pictures.js";
import { decimal, integer, percent, seconds } from "./readings.js";

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
    find("button[type=submit]", form(name)).disabled = !fitting.length || form(name).dataset.busy === "true";
  }
  pictures.offer(mostBytes);
}

/** Run what a form asks for: its button waits meanwhile, and an error is shown where results are. */
async function run(name, work) {
  const [own, result] = [form(name), find(".result", form(name))];
  const submit = find("button[type=submit]", own);
  own.dataset.busy = submit.disabled = true;
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
    own.dataset.busy = submit.disabled = false;
  }
}

function on(name, work) {
  form(name).addEventListener("submit", (event) => {
    event.preventDefault();
    run(name, work);
  });
}

// ── Chat ─────────────────────────────────────────────────────────────────────────────────────────

const chat = form("chat");
const turns = find(".turns", chat);
const [stop, clear] = [find(".stop", chat), find(".clear", chat)];
const pictures = takePictures(chat, (text) => say(find(".result", chat), text));
let messages = [];
let writing = null;

function addTurn(role, text = "", shown = []) {
  const [thought, words] = [make("span", { class: "thought" }), make("span", {}, text)];
  const turn = make("div", { class: `turn ${role}` }, ...shown.map(picture), thought, words);
  turns.append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return { turn, thought, words };
}

on("chat", async (result, elapsed) => {
  const { text, model } = chat.elements;
  const asked = text.value.trim() || text.placeholder;
  const [shown, content] = await pictures.take(asked);
  messages.push({ role: "user", content });
  addTurn("user", asked, shown);
  text.value = "";
  const { turn, thought, words } = addTurn("assistant");
  writing = new AbortController();
  stop.hidden = false;
  let [answer, usage, timings, firstS, leftOut] = ["", null, null, null, 0];
  try {
    const body = { model: model.value, messages, stream: true, stream_options: { include_usage: true } };
    const given = { "x-gateway-leave-out-images": "true" }; // of earlier turns, if the model reads none
    const note = (headers) => (leftOut = Number(headers.get("x-gateway-images-left-out")));
    for await (const event of events("v1/chat/completions", body, { signal: writing.signal, given, note })) {
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
      const delta = event.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) firstS ??= elapsed();
      if (delta.reasoning_content) thought.append(delta.reasoning_content);
      if (delta.content) {
        answer += delta.content;
        const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 24;
        words.append(delta.content);
        if (isAtEnd) turns.scrollTop = turns.scrollHeight;
      }
    }
    say(result, describe(usage, timings, firstS, elapsed(), leftOut));
  } catch (error) {
    if (!writing.signal.aborted) {
      if (!answer) turn.remove();
      throw error;
    }
    say(result, "Stopped.");
  } finally {
    stop.hidden = true;
    if (answer) messages.push({ role: "assistant", content: answer });
    else messages.pop(); // what was not answered is not part of the conversation
  }
});

function describe(usage, timings, firstS, totalS, leftOut) {
  if (!usage) return "";
  const { completion_tokens: written, prompt_tokens: readTokens } = usage;
  const decodeS = (timings?.decode_ms ?? 0) / 1000;
  const parts = [`${integer(readTokens)} prompt tokens, ${integer(written)} completion tokens`];
  if (firstS != null) parts.push(`first token after ${seconds(firstS)}`);
  if (decodeS > 0 && written > 1) parts.push(`${decimal((written - 1) / decodeS)} tokens/s`);
  parts.push(`${seconds(totalS)} in total`);
  if (leftOut) parts.push(`pictures of earlier turns left out, as this model reads text: ${leftOut}`);
  return parts.join(" · ");
}

stop.addEventListener("click", () => writing?.abort());
clear.addEventListener("click", () => {
  writing?.abort();
  messages = [];
  for (const each of turns.querySelectorAll("img")) URL.revokeObjectURL(each.src);
  turns.replaceChildren();
  say(find(".result", chat), "");
});
chat.elements.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (chat.dataset.busy !== "true") chat.requestSubmit();
  }
});

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
  result.replaceChildren(
    ...results.map(({ index, relevance_score: score }) => {
      const bar = make("i");
      bar.style.width = percent(score).replace(" ", "");
      const share = make("b", { title: String(score) }, score.toFixed(3));
      return make("li", {}, make("span", {}, texts[index]), share, make("span", { class: "meter" }, bar));
    }),
  );
});
