// The page of the endpoints, made from /openapi.json: fields, an example, answers and errors of each.

import { copyButton, find, make, say } from "./elements.js";
import { call, ROOT } from "./gateway.js";
import { writer } from "./markdown.js";

const NUMBERS = { minimum: "from", exclusiveMinimum: "above", maximum: "to", exclusiveMaximum: "below" };
const BOUNDS = { ...NUMBERS, minLength: "characters from", maxLength: "characters to", minItems: "items from", maxItems: "items to" };
const LEFT_OUT = /^(?:Refused\.|Accepted, without effect\.)/;
let schemas = {};

const nameOf = (schema) => schema.$ref?.split("/").at(-1);
const optionsOf = (schema) => schema.anyOf ?? schema.oneOf;
const json = (value) => JSON.stringify(value);

/** Name a schema's type. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum ?? "const" in schema) return (schema.enum ?? [schema.const]).map(json).join(" | ");
  if (optionsOf(schema)) return optionsOf(schema).map(typeOf).join(" | ");
  if (schema.items) return `list of ${typeOf(schema.items)}${boundsOf(schema)}`;
  const values = schema.additionalProperties;
  if (values?.type || values?.$ref) return `object of ${typeOf(values)}`;
  return [schema.type ?? "any"].flat().join(" | ") + boundsOf(schema);
}

function boundsOf(schema) {
  const found = Object.keys(BOUNDS).filter((name) => name in schema).map((name) => `${BOUNDS[name]} ${schema[name]}`);
  return found.length ? ` (${found.join(" ")})` : "";
}

/** Return the names of the schemas that a type consists of. */
function partsOf(schema) {
  if (schema.$ref) return [nameOf(schema)];
  return [...(optionsOf(schema) ?? []), schema.items, schema.additionalProperties].filter(Boolean).flatMap(partsOf);
}

/** Make a text of the document, whose links lead to files that are not here. */
function prose(text) {
  const made = make("div", { class: "prose" });
  const written = writer(made);
  written.add(text.replace(/\[([^\]]+)\]\([^)]*\)/g, "$1"));
  written.end();
  return made;
}

/** Fold what `fill` makes when it is first opened: schemas may contain themselves. */
function folded(summary, fill, attributes = {}) {
  const made = make("details", attributes, make("summary", {}, ...summary));
  made.addEventListener("toggle", () => made.children.length > 1 || made.append(...fill()));
  return made;
}

const foldParts = (schema) => [...new Set(partsOf(schema))].map((name) => folded([make("code", {}, name)], () => shape(schemas[name])));

/** Return a schema's elements: a table of its fields, or its type, and the folded schemas inside it. */
function shape(schema) {
  const fields = Object.entries(schema.properties ?? {});
  if (!fields.length) return [make("p", {}, make("code", {}, typeOf(schema))), ...foldParts(schema)];
  const isLeftOut = ([, field]) => LEFT_OUT.test(field.description ?? "");
  const isRequired = ([name]) => Boolean(schema.required?.includes(name));
  const served = fields.filter((field) => !isLeftOut(field)).sort((one, other) => isRequired(other) - isRequired(one));
  const others = fields.filter(isLeftOut);
  const head = () => make("tr", {}, ...["Field", "Type", "What it says"].map((name) => make("th", { scope: "col" }, name)));
  const table = (entries) => make("table", { class: "cards" }, make("thead", {}, head()), make("tbody", {}, ...entries.map((entry) => fieldRow(entry, isRequired(entry)))));
  const inner = foldParts({ anyOf: served.map(([, field]) => field) });
  return [table(served), ...inner, ...(others.length ? [folded(["Fields that are refused, or have no effect"], () => [table(others)])] : [])];
}

function fieldRow([name, field], isRequired) {
  const words = make("td", { class: "long" });
  if (isRequired) words.append(make("b", {}, "Required. "));
  if (field.description) words.append(prose(field.description));
  if (field.default != null) words.append(make("p", { class: "quiet" }, `Default: ${json(field.default)}`));
  if (field.examples?.length) words.append(make("p", { class: "quiet" }, `For example ${field.examples.map(json).join(", ")}`));
  return make("tr", {}, make("th", { scope: "row", class: "long" }, make("code", {}, name)), make("td", { class: "long" }, make("code", {}, typeOf(field))), words);
}

function keyFor(security) {
  if (!security.length || security.some((each) => !Object.keys(each).length)) return "No key is needed.";
  return security.some((each) => each.admin_key) ? "The admin key is needed." : "An API key is needed, as a bearer token or in x-api-key.";
}

function example(method, address, body, needsKey) {
  const filled = address.replace(/{(\w+)}/g, (_, name) => name.toUpperCase());
  const words = [`curl ${filled}`, ...(needsKey ? ['-H "Authorization: Bearer $KEY"'] : []), ...(method === (body ? "POST" : "GET") ? [] : [`-X ${method}`])];
  if (body) words.push('-H "Content-Type: application/json"', `-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  const code = make("code", {}, words.join(" \\\n  "));
  return make("div", { class: "code" }, make("div", { class: "head" }, make("span", {}, "sh"), copyButton(() => code.textContent, code, "Copy this command")), make("pre", { tabindex: 0 }, code));
}

function* parts(operation, method, address, security) {
  const heading = (text) => make("h3", {}, text);
  if (operation.description) yield prose(operation.description);
  yield make("p", { class: "quiet" }, keyFor(security));
  const content = operation.requestBody?.content["application/json"];
  yield example(method, address, content?.example, !keyFor(security).startsWith("No"));
  const given = Object.fromEntries((operation.parameters ?? []).map(({ name, in: place, schema, description }) => [name, { ...schema, description: `${description ?? ""} In the ${place}.` }]));
  if (operation.parameters) yield* [heading("Parameters"), ...shape({ properties: given })];
  if (content) yield* [heading("Fields"), ...shape(schemas[nameOf(content.schema)] ?? content.schema)];
  const answers = Object.entries(operation.responses);
  for (const [status, answer] of answers.filter(([each]) => each < 400)) {
    yield heading(`Answer: ${status} ${answer.description}`);
    for (const [type, { schema, "x-event-schema": event }] of Object.entries(answer.content)) {
      yield make("p", { class: "quiet" }, event ? `${type}, an event of which is` : type);
      if (event ?? schema) yield* foldParts(event ?? schema);
    }
  }
  const errors = answers.filter(([each]) => each >= 400);
  yield heading("Errors");
  yield make("ul", {}, ...errors.map(([status, { description }]) => make("li", {}, `${status} ${description}`)));
  yield* foldParts({ anyOf: errors.flatMap(([, { content: of }]) => Object.values(of).map(({ schema }) => schema ?? {})) });
}

function show(described) {
  schemas = described.components.schemas;
  say(find("#version"), described.info.version);
  for (const [path, item] of Object.entries(described.paths)) {
    const base = (item.servers ?? described.servers)[0].url.slice(1);
    for (const [method, operation] of Object.entries(item).filter(([name]) => name !== "servers")) {
      const address = new URL(base + (base ? path : path.slice(1)), ROOT).href.replaceAll("%7B", "{").replaceAll("%7D", "}");
      const summary = [make("b", { class: "method" }, method.toUpperCase()), make("code", {}, (base && `/${base}`) + path), make("span", { class: "quiet" }, operation.summary)];
      const fill = () => [...parts(operation, method.toUpperCase(), address, operation.security ?? described.security)];
      find("#endpoints").append(folded(summary, fill, { id: operation.operationId, class: "endpoint" }));
    }
  }
}

function openNamed() {
  const named = document.getElementById(location.hash.slice(1));
  Object.assign(named ?? {}, { open: true, hidden: false });
  named?.scrollIntoView();
}

find("#filter").addEventListener("input", ({ target }) => {
  for (const each of find("#endpoints").children) each.hidden = !find("summary", each).textContent.toLowerCase().includes(target.value.trim().toLowerCase());
});
window.addEventListener("hashchange", openNamed);
try {
  show(await (await call("openapi.json")).json());
  openNamed();
} catch (error) {
  find("#notice").hidden = false;
  say(find("#notice"), error.status === 401 ? "This gateway asks for a key: enter it under Keys of the dashboard, and come back." : error.message);
}
