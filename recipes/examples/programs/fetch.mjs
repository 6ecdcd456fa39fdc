// Coder and reviewer in JavaScript, without any package. Node 18 or later.
//
//     python recipes/train_magrpo.py --workflow "node recipes/examples/programs/fetch.mjs" --agents coder reviewer --max_calls 1

import { readFileSync } from "node:fs";

const problem = JSON.parse(readFileSync(0, "utf8"));

async function ask(model, content) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages: [{ role: "user", content }] }),
  });
  if (!response.ok) throw new Error(await response.text());
  return (await response.json()).choices[0].message.content;
}

const draft = await ask("coder", `${problem.prompt}\n\nWrite the function. Code only.`);
const review = `${problem.prompt}\n\nThis may have a mistake:\n${draft}\n\nWrite the correct function. Code only.`;
console.log(await ask("reviewer", review));
