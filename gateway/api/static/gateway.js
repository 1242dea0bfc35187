// The gateway as the page calls it: keys, requests, and the two kinds of stream.

export const ROOT = new URL("../", import.meta.url); // also right behind a proxy that adds a prefix
const NAMES = { api: "mlx-gateway.api-key", admin: "mlx-gateway.admin-key" };
const UNREACHABLE = "The gateway cannot be reached.";

/** The keys of this tab: session storage ends with it, and no other tab reads it. */
export const keys = {
  get: (kind) => sessionStorage.getItem(NAMES[kind]) ?? "",
  set: (kind, key) =>
    key ? sessionStorage.setItem(NAMES[kind], key) : sessionStorage.removeItem(NAMES[kind]),
};

/** An error of the gateway, or of the way to it (`status` 0). */
export class CallError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** Call the gateway; throws CallError with what it said. A key goes in a header, never in a URL. */
export async function call(path, { kind = "api", body, method = body ? "POST" : "GET", signal, given = {} } = {}) {
  const headers = new Headers(given);
  if (keys.get(kind)) headers.set("authorization", `Bearer ${keys.get(kind)}`);
  if (body) headers.set("content-type", "application/json");
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method,
      headers,
      body: body && JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new CallError(0, "unreachable", UNREACHABLE);
  }
  if (answer.ok) return answer;
  let told = null;
  try {
    told = (await answer.json()).error;
  } catch {
    // a proxy's page, perhaps
  }
  throw new CallError(
    answer.status,
    told?.code ?? null,
    told?.message ?? `The answer has status ${answer.status}.`,
    Number(answer.headers.get("retry-after")) || null,
  );
}

async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new CallError(0, "unreachable", UNREACHABLE);
      });
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Yield samples, one a second: with an admin key, those that tell of requests and errors. */
export async function* samples(signal) {
  const kind = keys.get("admin") ? "admin" : "api";
  const path = kind === "admin" ? "admin/samples" : "dashboard/samples";
  for await (const line of lines(await call(path, { kind, signal }))) {
    if (line) yield JSON.parse(line);
  }
}

/** Yield the events of a streamed answer, whose headers `note` is given; throws CallError for an error. */
export async function* events(path, body, { note, ...options } = {}) {
  const answer = await call(path, { body, ...options });
  note?.(answer.headers);
  for await (const line of lines(answer)) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice("data: ".length));
    if (event.error) throw new CallError(200, event.error.code, event.error.message);
    yield event;
  }
}

/** Do something with a model that the admin key allows: load, unload, pin, unpin. */
export function changeModel(id, action) {
  const path = id.split("/").map(encodeURIComponent).join("/");
  return call(`admin/models/${path}/${action}`, { kind: "admin", method: "POST" });
}

/** Have a model downloaded, and yield how far it is. It goes on if nobody reads that. */
export function pullModel(model) {
  return events("admin/models/pull", { model }, { kind: "admin" });
}

export function cancelRequest(number) {
  return call(`admin/requests/${number}/cancel`, { kind: "admin", method: "POST" });
}
