// The chat: a conversation that this tab keeps, and answers that are Markdown while they are written.

import { copyButton, find, make, say } from "./elements.js";
import { events } from "./gateway.js";
import { writer } from "./markdown.js";
import { picture, takePictures } from "./pictures.js";
import { decimal, integer, seconds } from "./readings.js";

const KEPT = "mlx-gateway.chat";
const MOST = 2_000_000; // characters of a conversation that the tab keeps, its pictures in base64 among them
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const ENDS = {
  stop: "The model ended its answer.",
  length: "Cut off: as many tokens as max_tokens, or the model’s context, allow.",
  tool_calls: "The model calls a tool, which this page does not run.",
};

/** Return a data URL's picture as one to show: a page may show `blob:` addresses only. */
function unpacked(url) {
  const [type, bytes] = url.slice("data:".length).split(";base64,");
  const file = new File([Uint8Array.from(atob(bytes), (each) => each.charCodeAt(0))], "A picture", { type });
  return { file, url: URL.createObjectURL(file) };
}

const isText = (part) => part.type === "text";
const size = (value) => JSON.stringify(value).length;
const wordsOf = ({ content }) => (Array.isArray(content) ? content.find(isText).text : content);
const picturesOf = ({ content }) => (Array.isArray(content) ? content.filter((part) => !isText(part)) : []);

/** Return what the tab can keep of a conversation: its end, without pictures if they are too large. */
function fitting(turns) {
  const bare = size(turns) <= MOST ? turns : turns.map((turn) => ({ ...turn, content: wordsOf(turn), left: turn.left || picturesOf(turn).length > 0 }));
  let room = MOST;
  const first = bare.findLastIndex((turn) => (room -= size(turn)) < 0) + 1;
  return bare.slice(bare[first]?.role === "assistant" ? first + 1 : first); // a conversation begins with a question
}

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

/** Let a form be a chat; `on` registers what it does when it is sent. Returns the pictures that it takes. */
export function startChat(form, on) {
  const [log, stop, clear, options, result] = [".turns", ".stop", ".clear", ".options", ".result"].map((each) => find(each, form));
  const { text, model, system } = form.elements;
  const pictures = takePictures(form, (told) => say(result, told));
  let [turns, writing] = [[], null]; // a turn is what is sent, and what is shown beside it

  /** Change the log, and follow its end if that was in sight. */
  function follow(change) {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  function show(turn, shown, ...parts) {
    const made = make("div", { class: `turn ${turn.role}` }, ...shown.map(picture), ...parts);
    if (turn.left) made.append(make("p", { class: "foot" }, "Its pictures were too large to be kept over a reload."));
    follow(() => log.append(made));
    return made;
  }

  const showQuestion = (turn, shown) => show(turn, shown, make("div", { class: "said" }, wordsOf(turn)));

  /** Show an answer that is to be written: thoughts first, which are folded once it begins. */
  function showAnswer(turn) {
    const [summary, thought, words] = [make("summary", {}, "Thinking …"), make("div"), make("div", { class: "words" })];
    const [fold, end] = [make("details", { class: "thought", open: "", hidden: "" }, summary, thought), make("span")];
    const copy = copyButton(() => turn.content, words, "Copy this answer");
    const foot = make("div", { class: "foot", hidden: "" }, end, copy);
    show(turn, [], fold, words, foot);
    const [thoughts, answer] = [thought, words].map((each) => writer(each, follow));
    let [isTouched, isOver] = [false, false];
    summary.addEventListener("click", () => (isTouched = true));

    function endThought() {
      if (isOver || turn.thoughtS == null) return;
      isOver = true;
      thoughts.end();
      say(summary, `Thought for ${seconds(turn.thoughtS)}`);
      if (!isTouched) fold.open = false;
    }

    return {
      think: (piece) => {
        fold.hidden = false;
        thoughts.add(piece);
      },
      endThought,
      say: (piece) => answer.add(piece),
      end() {
        endThought();
        answer.end();
        follow(() => (foot.hidden = false));
        say(end, turn.end);
        copy.hidden = !turn.content;
      },
    };
  }

  function keep() {
    const kept = fitting(turns);
    const record = { turns: kept, isCut: kept.length < turns.length, isOpen: options.open };
    for (const name of ["model", "system", "text", ...NUMBERS]) record[name] = form.elements[name].value;
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(record));
    } catch {
      say(result, "This tab has no room to keep the conversation: a reload ends it.");
    }
  }

  function restore({ turns: kept, isCut, isOpen, ...fields }) {
    if (fields.model) model.append(make("option", { value: fields.model, "data-key": fields.model }, fields.model));
    for (const name in fields) form.elements[name].value = fields[name];
    options.open = isOpen;
    if (isCut) say(result, "Earlier messages were too long to be kept over the reload.");
    for (const turn of kept) {
      if (turn.role === "user") {
        showQuestion(turn, picturesOf(turn).map((part) => unpacked(part.image_url.url)));
        continue;
      }
      const shown = showAnswer(turn);
      if (turn.thought) shown.think(turn.thought);
      shown.say(turn.content);
      shown.end();
    }
    turns = kept;
    log.scrollTop = log.scrollHeight;
  }

  on(async (told, elapsed) => {
    const own = turns; // another one after a clear
    const asked = text.value.trim() || (own.length && !pictures.areChosen() ? "" : text.placeholder);
    if (!asked) return;
    const [shown, content] = await pictures.take(asked);
    const [question, turn] = [{ role: "user", content }, { role: "assistant", content: "", thought: "" }];
    showQuestion(question, shown).scrollIntoView({ block: "nearest" });
    text.value = "";
    const answer = showAnswer(turn);
    log.scrollTop = log.scrollHeight;
    log.setAttribute("aria-busy", true); // read aloud when it is whole
    writing = new AbortController();
    stop.hidden = false;
    let [usage, timings, firstS, leftOut] = [null, null, null, 0];
    const given = { "x-gateway-leave-out-images": "true" }; // of earlier turns, if the model reads none
    const note = (headers) => (leftOut = Number(headers.get("x-gateway-images-left-out")));
    const endThought = () => {
      if (turn.thought) turn.thoughtS ??= elapsed() - firstS;
      answer.endThought();
    };
    try {
      const messages = [...own, question].map(({ role, content: said }) => ({ role, content: said }));
      if (system.value.trim()) messages.unshift({ role: "system", content: system.value });
      const body = { model: model.value, messages, stream: true, stream_options: { include_usage: true } };
      for (const name of NUMBERS) if (form.elements[name].value) body[name] = Number(form.elements[name].value);
      for await (const event of events("v1/chat/completions", body, { signal: writing.signal, given, note })) {
        usage = event.usage ?? usage;
        timings = event.timings ?? timings;
        const { delta = {}, finish_reason: reason } = event.choices[0] ?? {};
        if (reason) turn.end = ENDS[reason] ?? `It ended with “${reason}”.`;
        if (delta.content || delta.reasoning_content) firstS ??= elapsed();
        if (delta.reasoning_content) {
          turn.thought += delta.reasoning_content;
          answer.think(delta.reasoning_content);
        }
        if (delta.content) {
          endThought();
          turn.content += delta.content;
          answer.say(delta.content);
        }
      }
      turn.end ??= "The answer ended without a reason.";
      say(told, describe(usage, timings, firstS, elapsed(), leftOut));
    } catch (error) {
      turn.end = writing.signal.aborted ? "You stopped it." : `Ended by an error: ${error.message}`;
      if (!writing.signal.aborted) throw error;
      if (own === turns) say(told, "Stopped.");
    } finally {
      if (document.activeElement === stop) text.focus();
      stop.hidden = true;
      log.removeAttribute("aria-busy");
      endThought();
      if (turn.content) own.push(question, turn);
      else turn.end += " Without an answer, the question is no part of the conversation.";
      answer.end();
      keep();
    }
  });

  function end() {
    writing?.abort();
    text.focus();
  }
  stop.addEventListener("click", end);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && !stop.hidden && end());
  clear.addEventListener("click", () => {
    end();
    turns = [];
    for (const each of log.querySelectorAll("img")) URL.revokeObjectURL(each.src);
    log.replaceChildren();
    say(result, "");
    keep();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  window.addEventListener("pagehide", keep);
  options.addEventListener("invalid", () => (options.open = true), true); // a hidden field can show no complaint

  try {
    restore(JSON.parse(sessionStorage.getItem(KEPT)) ?? { turns });
  } catch {
    sessionStorage.removeItem(KEPT); // another version of this page has written it
  }
  return pictures;
}
