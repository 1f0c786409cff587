// The process that install.mjs times: opens a model with one engine, and writes the first token of an answer.
const [engine, model] = process.argv.slice(2);
const { open } = await import(engine);
const opened = await open({ model: JSON.parse(model), threads: 2, contextTokens: 512 });
const prompt = [0, ...Array.from({ length: 15 }, (_, index) => 100 + 7 * index)];
for await (const token of opened.generate(prompt, 1)) process.stdout.write(`${token}\n`);
await opened.close();
