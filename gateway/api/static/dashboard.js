// The dashboard: watches the gateway while the page is visible, and shows each sample.

import { cancelRequest, changeModel, keys, pullModel, samples } from "./gateway.js";
import { button, fill, find, list, make, say, sparkline } from "./elements.js";
import * as read from "./readings.js";
import { offerModels } from "./try_it.js";

const STAGES = {
  parse: "Reading and checking the request",
  tokenise: "Text to tokens",
  images: "Decoding images, and their prompt to tokens",
  load: "Loading the model",
  compile: "Preparing the grammar of a structured answer",
  queue: "Waiting for a place in a batch",
  lane: "Waiting for the device",
  prefill: "From joining the batch to the first token",
  decode: "From the first token to the last",
  inference: "Computing embeddings or scores",
  serialise: "Writing the answer as JSON",
};
const RARE_STAGES = ["images", "load", "compile"]; // shown where a request had them
const KINDS = ["decode", "prefill", "embedding", "rerank", "load"];
const QUANTILES = [0.5, 0.95, 0.99];
const RETRY_S = 3;

const history = new read.History();
let chosen = null; // "recent" or "start", by hand
let isRecent = false; // else since the start, until a request has ended under this tab
let problem = null; // what the last action ran into
let answered = 0; // when the last sample came

// ── The watch ────────────────────────────────────────────────────────────────────────────────────

let watch = null;

function look() {
  watch?.abort();
  watch = document.hidden ? null : new AbortController();
  if (watch) follow(watch.signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    let waitS = RETRY_S;
    try {
      for await (const sample of samples(signal)) {
        if (signal.aborted) return;
        answered = Date.now();
        history.add(sample);
        show(sample);
      }
    } catch (error) {
      if (signal.aborted) return;
      showStatus("bad", "not connected");
      find("main").classList.add("old");
      if (error.status === 401) {
        const kind = ["admin", "api"].find(keys.get);
        const name = kind === "admin" ? "admin" : "API";
        return askForKeys(kind ? `The gateway does not accept this ${name} key.` : "This gateway asks for a key.");
      }
      if (error.status === 404 && keys.get("admin")) {
        keys.set("admin", ""); // the gateway has no admin key
        continue;
      }
      notify(`${error.message} Trying again.`);
      waitS = error.retryAfter ?? RETRY_S;
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 1000 * waitS);
      signal.addEventListener("abort", () => resolve(clearTimeout(timer)));
    });
  }
}

function notify(text) {
  find("#notice").hidden = !text;
  say(find("#notice"), text ?? "");
}

function failed(error) {
  if (error.status === 401) return askForKeys("The gateway does not accept this admin key.");
  problem = error.message;
  notify(problem);
  setTimeout(() => {
    problem = null;
  }, 8000);
}

// ── Keys ─────────────────────────────────────────────────────────────────────────────────────────

const dialog = find("#keys");

function askForKeys(reason = "") {
  const form = find("form", dialog);
  say(find("#keys-reason"), reason);
  if (reason) notify(`${reason} Enter one under Keys.`); // for those who close the dialog
  form.elements.api.value = keys.get("api");
  form.elements.admin.value = keys.get("admin");
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("close", () => {
  const form = find("form", dialog);
  const isForgotten = dialog.returnValue === "forget";
  if (dialog.returnValue === "save" || isForgotten) {
    for (const kind of ["api", "admin"]) keys.set(kind, isForgotten ? "" : form.elements[kind].value.trim());
    look();
  }
  form.reset();
  dialog.returnValue = "";
});
find("#keys-button").addEventListener("click", () => askForKeys());

// ── What is shown ────────────────────────────────────────────────────────────────────────────────

function show(sample) {
  notify(problem);
  find("main").classList.remove("old");
  isRecent = chosen ? chosen === "recent" : read.count(history.histogram("gateway_stage_seconds", {}, true)) > 0;
  const isReady = sample.status === "ready";
  showStatus(isReady ? "good" : ["loading", "draining"].includes(sample.status) ? "warn" : "bad", sample.status);
  say(find("#version"), sample.version);
  say(find("#uptime"), `up ${read.duration(sample.at - sample.started)}`);
  showTiles(sample);
  showModels(sample);
  showPulls(sample);
  showLane(sample);
  showSpan(sample);
  showBatches(sample);
  showStages();
  showRequests(sample);
  showErrors(sample);
  offerModels(sample.models, sample.max_image_bytes);
}

function showStatus(kind, text) {
  find("#status").dataset.is = kind;
  say(find("#status-text"), text);
}

const meanOf = (times) => (read.count(times) ? `mean of ${read.integer(read.count(times))}` : "none");
const firstTokens = () => history.histogram("gateway_time_to_first_token_seconds", {}, isRecent);

const counterTile = (name, series) => {
  const aside = (now) => `${read.integer(read.value(now, series))} in total`;
  return { name, series, unit: "/s", format: read.rate, figure: () => history.rate(series), aside };
};

const TILES = [
  counterTile("Requests", "gateway_requests_total"),
  counterTile("Prompt tokens", "gateway_prompt_tokens_total"),
  counterTile("Completion tokens", "gateway_completion_tokens_total"),
  {
    name: "First token",
    figure: () => read.typical(firstTokens(), 0.5),
    line: () => read.typical(history.lately("gateway_time_to_first_token_seconds"), 0.5),
    format: read.seconds,
    aside: () => `${read.isFew(firstTokens()) ? meanOf(firstTokens()) : `p50; p95 ${read.seconds(read.quantile(firstTokens(), 0.95))}`}, ${spanName()}`,
  },
  {
    name: "Waiting for a batch",
    figure: (now) => read.value(now, "gateway_tickets"),
    format: read.integer,
    aside: (now) =>
      `${read.integer(read.value(now, "gateway_queue_depth"))} in progress, ${read.integer(read.value(now, "gateway_queue_tokens"))} tokens`,
  },
  {
    name: "Memory",
    figure: (now) => read.value(now, "gateway_budget_held_bytes"),
    format: read.bytes,
    most: (now) => read.value(now, "gateway_budget_limit_bytes"),
    aside: (now) =>
      `of ${read.bytes(read.value(now, "gateway_budget_limit_bytes"))} · MLX uses ${read.bytes(read.value(now, "gateway_device_active_bytes"))}`,
  },
].map((tile) => {
  const [svg, draw] = sparkline();
  const [figure, aside] = [make("div", { class: "figure" }), make("div", { class: "aside" })];
  find("#tiles").append(make("div", { class: "tile" }, make("h2", {}, tile.name), figure, aside, svg));
  if (tile.series) aside.dataset.series = tile.series;
  return { ...tile, elements: { figure, aside, draw } };
});

function showTiles(now) {
  for (const { name, unit, figure, line = figure, format, aside, most, elements } of TILES) {
    const number = figure(now);
    say(elements.figure, format(number) + (unit && number != null ? ` ${unit}` : ""));
    say(elements.aside, aside(now));
    elements.draw(history.draw(name, line(now) ?? 0), most?.(now));
  }
}

/** Show a table, or a sentence in its place while it has no rows. */
function showTable(name, rows, ifEmpty, hint = "") {
  find(`#${name}`).hidden = !rows.length;
  say(find(`#${name}-hint`), rows.length ? hint : ifEmpty);
}

const cells = (count, classes = {}) =>
  Array.from({ length: count }, (_, index) => make("td", classes[index] ? { class: classes[index] } : {}));
const numbers = (...indices) => Object.fromEntries(indices.map((index) => [index, "number"]));

function showModels(now) {
  const create = ({ id, kind, aliases }) => {
    const name = make("th", { scope: "row", class: "long" }, id);
    const more = aliases.length ? `${kind} · ${aliases.join(", ")}` : kind;
    name.append(make("span", { class: "sub" }, more));
    return make("tr", {}, name, ...cells(7, { ...numbers(1, 2, 3, 4, 5), 0: "long", 6: "actions" }));
  };
  list(find("#models tbody"), now.models, (each) => each.id, create, (row, model) => {
    const { id } = model;
    const gauge = (name) => read.integer(read.value(now, name, { model: id }));
    const named = (name) => `${name}{model=${JSON.stringify(id)}}`;
    const gauges = ["gateway_queue_depth", "gateway_tickets", "gateway_rows", "gateway_queue_tokens"];
    showState(row.cells[1], model, now.at);
    fill(row, [undefined, undefined, read.bytes(model.bytes), ...gauges.map(gauge)], [null, null, null, ...gauges.map(named)]);
    list(row.cells[7], actionsFor(model), (each) => each, (action) => actionButton(id, action), () => {});
  });
  const hint = adminHint(now, "", "load, unload and pin models");
  showTable("models", now.models, "No models: add one to models.yaml.", hint);
}

const ago = (seconds) => (seconds < 5 ? "now" : `${read.duration(seconds)} ago`);

function showState(cell, { state, pinned, error, batching, last_used: used }, at) {
  if (!cell.firstElementChild) {
    cell.append(make("span", { class: "state" }), make("span", { class: "pinned" }, "pinned"), make("span", { class: "sub" }), make("span", { class: "sub wrong" }));
  }
  const [name, pin, last, wrong] = cell.children;
  name.dataset.is = state;
  say(name, state);
  pin.hidden = !pinned;
  say(last, used ? `used ${ago(at - used)}` : "");
  const trouble = error ?? batching?.problem ?? "";
  say(wrong, trouble);
  wrong.hidden = !trouble;
}

function actionsFor({ state, pinned }) {
  if (!keys.get("admin")) return [];
  return [state === "loaded" ? "unload" : "load", pinned ? "unpin" : "pin"];
}

function actionButton(id, action) {
  return button(action, () => changeModel(id, action), failed, { "aria-label": `${action} ${id}` });
}

// ── Downloads ────────────────────────────────────────────────────────────────────────────────────

function showPulls({ pulls }) {
  find("#pulls").hidden = !pulls.length;
  find("#pull").hidden = !keys.get("admin");
  list(find("#pulls"), pulls, (each) => each.model, () => make("li"), (item, pull) => say(item, progress(pull)));
}

function progress({ model, status, completed, total }) {
  if (status === "success") return `${model} is here.`;
  if (status === "waiting" || !total) return `${model}: ${status}`;
  return `${model}: ${read.percent(completed / total)} of ${read.bytes(total)}`;
}

find("#pull").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const [field, result] = [form.elements.model, find(".result", form)];
  find("button", form).disabled = true;
  try {
    say(result, "");
    for await (const pull of pullModel(field.value.trim())) if (pull.status === "success") say(result, progress(pull));
    field.value = "";
  } catch (error) {
    say(result, error.message);
    if (error.status === 401) failed(error);
  } finally {
    find("button", form).disabled = false;
  }
});

const laneLines = new Map();

function showLane(now) {
  const known = read.labelValues(now, "gateway_lane_seconds_total", "kind");
  const kinds = [...KINDS.filter((each) => known.includes(each)), ...known.filter((each) => !KINDS.includes(each))];
  const rates = kinds.map((kind) => history.rate("gateway_lane_seconds_total", { kind }));
  // A turn counts as a whole in the second that it ends in.
  const total = Math.max(1, rates.reduce((sum, rate) => sum + rate, 0));
  const shares = rates.map((rate) => rate / total);
  const style = (kind) => `k-${KINDS.includes(kind) ? kind : "other"}`;
  const items = kinds.map((kind, index) => ({ kind, share: shares[index] }));
  list(find("#lane-bar"), items, (each) => each.kind, ({ kind }) => make("i", { class: style(kind), title: kind }), (part, { share }) => {
    part.style.width = `${100 * share}%`;
  });
  const create = ({ kind }) => {
    const [svg, draw] = sparkline({ class: style(kind) });
    laneLines.set(kind, draw);
    const swatch = make("span", { class: `swatch ${style(kind)}` });
    return make("tr", {}, make("th", { scope: "row" }, swatch, kind), make("td", { class: "number" }), make("td", { class: "spark" }, svg), ...cells(2, numbers(0, 1)));
  };
  list(find("#lane tbody"), items, (each) => each.kind, create, (row, { kind, share }) => {
    const p95 = (name) => {
      const times = history.histogram(name, { kind }, isRecent);
      const few = read.count(times) && read.isFew(times) ? `, ${meanOf(times)}` : "";
      return read.seconds(read.typical(times, 0.95)) + few;
    };
    fill(row, [undefined, read.percent(share), undefined, p95("gateway_lane_hold_seconds"), p95("gateway_lane_wait_seconds")]);
    laneLines.get(kind)(history.draw(`lane ${kind}`, share), 1);
  });
}

const spanName = () => (isRecent ? `last ${watched()}` : "since start");
const watched = () => read.duration(Math.max(1, history.now.at - history.start.at));

function showSpan(now) {
  say(find("#span-hint"), isRecent
    ? `Requests that ended in the last ${watched()}, while this tab was watching.`
    : `All requests since the gateway started, ${read.duration(now.at - now.started)} ago.`);
  for (const label of document.querySelectorAll(".span-label")) say(label, spanName());
  for (const choice of document.querySelectorAll("[data-span]")) {
    choice.setAttribute("aria-pressed", (choice.dataset.span === "recent") === isRecent);
  }
}

for (const choice of document.querySelectorAll("[data-span]")) {
  choice.addEventListener("click", () => {
    chosen = choice.dataset.span;
    if (history.now) show(history.now);
  });
}

function showBatches(now) {
  const models = now.models.filter(({ id }) => read.value(now, "gateway_prompt_tokens_total", { model: id }) > 0);
  const create = ({ id }) => make("tr", {}, make("th", { scope: "row", class: "long" }, id), ...cells(6, numbers(0, 1, 2, 3, 4, 5)));
  list(find("#batches tbody"), models, (each) => each.id, create, (row, { id: model }) => {
    const average = (name) => read.mean(history.histogram(name, { model }, isRecent));
    const total = (name, more = {}) => history.total(name, { model, ...more }, isRecent);
    const share = (part, whole) => (whole > 0 ? part / whole : null);
    const texts = total("gateway_embedding_cache_total");
    const features = "gateway_image_features_total";
    const ahead = "gateway_tokens_read_ahead_total";
    fill(row, [
      undefined,
      read.decimal(average("gateway_batch_rows")),
      read.percent(average("gateway_batch_padding_ratio")),
      read.percent(share(total("gateway_cached_prompt_tokens_total"), total("gateway_prompt_tokens_total"))),
      read.percent(share(total("gateway_embedding_cache_total", { outcome: "hit" }), texts)),
      read.percent(share(total(features, { result: "hit" }), total(features))),
      read.percent(share(total(ahead, { kind: "accepted" }), total(ahead, { kind: "drafted" }))),
    ]);
  });
  showTable("batches", models, "No model has read a prompt or a text yet.");
}

function showStages() {
  const name = "gateway_stage_seconds";
  const every = history.series(name);
  const stages = Object.keys(STAGES).filter((stage) => !RARE_STAGES.includes(stage) || every.some((labels) => labels.stage === stage));
  const head = find("#stages thead tr");
  list(head, ["", ...stages], (each) => each, (stage) => make("th", { scope: "col", class: stage && "number", title: STAGES[stage] ?? "" }, stage || "Model and path"), () => {});
  const pairs = new Map(every.map(({ model, route }) => [`${model} ${route}`, { model, route }]));
  const counted = ({ model, route }, stage) => history.histogram(name, { model, route, stage }, isRecent);
  const requests = (pair) => Math.max(...stages.map((stage) => read.count(counted(pair, stage))));
  const rows = [...pairs.values()].filter(requests).sort((a, b) => a.model.localeCompare(b.model) || a.route.localeCompare(b.route));
  const create = ({ model }) => make("tr", {}, make("th", { scope: "row", class: "long" }, model, make("span", { class: "sub" })));
  list(find("#stages tbody"), rows, ({ model, route }) => `${model} ${route}`, create, (row, pair) => {
    const ended = requests(pair);
    say(find(".sub", row), `${pair.route} · ${read.integer(ended)} ${ended === 1 ? "request" : "requests"}`);
    stages.forEach((stage, index) => {
      const cell = row.cells[index + 1] ?? row.insertCell();
      if (!cell.children.length) cell.append(make("b"), make("span"), make("span"));
      const times = counted(pair, stage);
      cell.title = `${stage}: ${read.integer(read.count(times))} requests`;
      cell.dataset.stage = cell.dataset.label = stage;
      cell.className = read.count(times) ? "number" : "number empty";
      const mean = read.count(times) ? [read.seconds(read.mean(times)), meanOf(times), ""] : ["", "", ""];
      const texts = read.isFew(times) ? mean : QUANTILES.map((q) => read.seconds(read.quantile(times, q)));
      texts.forEach((text, nth) => say(cell.children[nth], text));
    });
  });
  showTable("stages", rows, `No request has ended ${isRecent ? `in the last ${watched()}` : "since the gateway started"}.`);
}

function showRequests(now) {
  const create = ({ number }) => {
    const made = make("tr", {}, ...cells(8, { ...numbers(0, 4, 5), 1: "long", 2: "long path", 6: "id", 7: "actions" }));
    made.cells[7].append(button("cancel", () => cancelRequest(number), failed, { class: "danger", "aria-label": `cancel request ${number}` }));
    return made;
  };
  const requests = now.requests ?? [];
  list(find("#requests tbody"), requests, (each) => each.number, create, (row, each) => {
    const stage = each.is_cancelled ? "cancelled" : each.stage;
    const texts = [read.seconds(each.age_s), each.model, each.route, stage, read.integer(each.tokens_in), read.integer(each.tokens_out), each.request_id];
    fill(row, texts.map((text) => text ?? read.NONE));
    row.cells[6].title = each.key ? `${each.request_id} (${each.key})` : each.request_id;
  });
  say(find("#in-flight-count"), now.requests ? read.integer(requests.length) : "");
  showTable("requests", requests, adminHint(now, "No request is in flight.", "see and cancel requests in flight"));
}

function showErrors(now) {
  const create = () => make("tr", {}, ...cells(7, { ...numbers(1, 5), 2: "long", 3: "long", 4: "long path", 6: "id" }));
  const errors = now.errors ?? [];
  list(find("#errors tbody"), errors, (each) => `${each.at} ${each.request_id}`, create, (row, each) => {
    const when = new Date(1000 * each.at).toLocaleTimeString([], { hour12: false });
    fill(row, [when, String(each.status), each.code, each.model ?? read.NONE, `${each.method} ${each.route}`, read.seconds(each.ms / 1000), each.request_id]);
    row.cells[6].title = each.request_id;
  });
  const hint = "Messages may repeat what callers sent, so they are not kept: look for the request id in the log.";
  showTable("errors", errors, adminHint(now, "No request has failed.", "see the last errors"), hint);
}

function adminHint(now, nothing, what) {
  if (now.requests) return nothing;
  return now.has_admin ? `Enter the admin key under Keys to ${what}.` : `Set GATEWAY_ADMIN_KEY to ${what}.`;
}

document.addEventListener("visibilitychange", look);
window.addEventListener("pagehide", () => watch?.abort());
setInterval(() => {
  if (watch && answered && Date.now() - answered > 5000 && find("#status").dataset.is !== "bad") showStatus("warn", "no news for 5 s");
}, 1000);
look();
