// The pictures of the next message: chosen, pasted or dropped, shown small, and sent as data URLs.

import { button, dataUrl, find, list, make, onFiles, say } from "./elements.js";
import { decimal } from "./readings.js";

const mib = (bytes) => `${decimal(bytes / 2 ** 20)} MiB`;

/** Make a picture's element. Its address is a `blob:`, the only one that the page may show. */
export const picture = ({ file, url }) => make("img", { src: url, alt: file.name });

/** Let a form take pictures while its chosen model reads them; `tell` says what is wrong with one. */
export function takePictures(form, tell) {
  const [strip, chooser, input, hint] = [".pictures", ".picture", "[type=file]", ".picture-hint"].map((each) => find(each, form));
  const { model, text } = form.elements;
  const example = text.placeholder;
  let [chosen, most] = [[], 0]; // most: bytes of one
  const isOffered = () => model.selectedOptions[0]?.dataset.sees === "true";

  function show(pictures) {
    chosen = pictures;
    list(strip, chosen, ({ url }) => url, (one) => {
      const remove = () => {
        URL.revokeObjectURL(one.url);
        show(chosen.filter((each) => each !== one));
        text.focus();
      };
      return make("li", {}, picture(one), button("×", remove, tell, { "aria-label": `Remove ${one.file.name}` }));
    }, () => {});
    text.placeholder = chosen.length ? "What does this show?" : example;
  }

  function add(files) {
    const wrong = ({ name, size, type }) =>
      (!isOffered() && "This model reads no pictures.") ||
      (!input.accept.split(",").includes(type) && `${name} is no PNG, JPEG, WEBP, GIF or BMP.`) ||
      (size > most && `${name} has ${mib(size)}, and at most ${mib(most)} are read.`);
    tell([...files].map(wrong).find(Boolean) ?? "");
    const right = [...files].filter((file) => !wrong(file));
    show([...chosen, ...right.map((file) => ({ file, url: URL.createObjectURL(file) }))]);
    input.value = ""; // the same file may be chosen again
  }

  function offer(given = most) {
    most = given;
    chooser.hidden = hint.hidden = !isOffered();
    say(hint, `Pictures of up to ${mib(most)}: PNG, JPEG, WEBP, GIF or BMP. You can paste or drop them, too.`);
  }

  model.addEventListener("change", () => offer());
  chooser.addEventListener("click", () => input.click());
  input.addEventListener("change", () => add(input.files));
  onFiles(form, add);

  /** Return the pictures, which the form then has no more, and a message's content: them and its text. */
  async function take(words) {
    if (chosen.length && !isOffered()) throw new Error("This model reads no pictures: remove them, or choose another model.");
    const taken = chosen;
    show([]);
    const urls = await Promise.all(taken.map(({ file }) => dataUrl(file)));
    const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    return [taken, parts.length ? [...parts, { type: "text", text: words }] : words];
  }

  return { offer, take, areChosen: () => chosen.length > 0 };
}
