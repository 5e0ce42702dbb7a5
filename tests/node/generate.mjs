// What a Node user does with the official client: prints the answer, with the picture as base64.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const answer = await client.images.generate({
  model: models[0],
  prompt: "a panda on a green background",
  size: "64x64",
  seed: 11,
});
const events = [];
for await (const event of await client.images.generate({
  model: models[0],
  prompt: "a panda on a green background",
  stream: true,
  partial_images: 2,
})) events.push(event);
let refused = null;
try {
  await client.images.generate({ model: models[0], prompt: "a panda", size: "65x64" });
} catch (error) {
  refused = { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
}
console.log(JSON.stringify({ models, answer, events, refused }));
