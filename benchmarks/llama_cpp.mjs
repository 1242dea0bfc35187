// Many answers from llama.cpp, decoded together, as node-llama-cpp brings it: run with node from a
// folder in which `npm install node-llama-cpp` was run.
//
//   node llama_cpp.mjs FOLDER FILE.gguf SEQUENCES CONTEXT
//
// Each line of stdin is {"prompts": [[token id, …], …], "tokens": the most of an answer}; each is
// answered by {"tokens": how many were written, "seconds": from the prompts on}.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { availableParallelism } from "node:os";
import { pathToFileURL } from "node:url";

const [folder, modelPath, sequences, contextSize] = process.argv.slice(2);
const resolved = createRequire(pathToFileURL(folder + "/")).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(resolved));

const llama = await getLlama({ gpu: false, build: "never", maxThreads: availableParallelism() });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
  sequences: Number(sequences),
  contextSize: Number(contextSize),
  threads: availableParallelism(),
});
const rows = Array.from({ length: Number(sequences) }, () => context.getSequence());
console.log(JSON.stringify({ ready: true, cpu: llama.systemInfo }));

async function answer(row, prompt, most) {
  await row.clearHistory();
  let written = 0;
  for await (const _ of row.evaluate(prompt, { temperature: 0 })) if (++written >= most) break;
  return written;
}

for await (const line of createInterface({ input: process.stdin })) {
  const { prompts, tokens } = JSON.parse(line);
  const started = performance.now();
  const written = await Promise.all(prompts.map((prompt, n) => answer(rows[n], prompt, tokens)));
  const seconds = (performance.now() - started) / 1000;
  console.log(JSON.stringify({ tokens: written.reduce((sum, each) => sum + each, 0), seconds }));
}
await llama.dispose();
process.exit(0);
