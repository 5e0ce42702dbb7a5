// What a Node user does with videos: makes two, fetches their files, lists them, and removes one.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const image = Buffer.from(process.argv[3], "base64");
const ids = async (query) => {
  const found = [];
  for await (const video of client.videos.list(query)) found.push(video.id);
  return found;
};

const created = await client.videos.create({
  model: "wan",
  prompt: "a fox on a blue background",
  seconds: "0.5",
  size: "48x32",
  seed: 11,
});
const statuses = [created.status];
let video = created;
while (video.status === "queued" || video.status === "in_progress") {
  await new Promise((resolve) => setTimeout(resolve, 100));
  video = await client.videos.retrieve(created.id);
  statuses.push(video.status);
}
const files = {};
for (const variant of ["video", "thumbnail", "spritesheet"]) {
  const response = await client.videos.downloadContent(video.id, { variant });
  const bytes = Buffer.from(await response.arrayBuffer());
  files[variant] = { type: response.headers.get("content-type"), base64: bytes.toString("base64") };
}
const moved = await client.videos.create({
  model: "wan-image",
  prompt: "a fox on a blue background",
  input_reference: await toFile(image, "fox.png", { type: "image/png" }),
  seed: 12,
});
const remixed = await client.videos.remix(video.id, { prompt: "a cat" });
const listed = { desc: await ids({ limit: 1 }), asc: await ids({ limit: 2, order: "asc" }) };
const deleted = await client.videos.delete(video.id);
const refuse = async (call) => {
  try {
    await call();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
};
const refused = {
  gone: await refuse(() => client.videos.retrieve(video.id)),
  size: await refuse(() => client.videos.create({ model: "wan", prompt: "a fox", size: "720x1280" })),
};
console.log(JSON.stringify({ created, statuses, video, files, moved, remixed, listed, deleted, refused }));
