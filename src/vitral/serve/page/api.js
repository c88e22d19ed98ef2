// What is asked of the server, and what is made of its answers.
let key = sessionStorage.getItem("key") ?? "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("key", given);
}

export class Trouble extends Error {
  constructor(kind, status, sentence) {
    super(sentence);
    this.kind = kind; // a key of the page's words
    this.status = status;
  }
}

const KINDS = { 401: "key", 413: "too-large", 415: "bad-image", 422: "bad-image", 429: "busy", 503: "busy" };

async function ask(address, options = {}, patience = 3) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let reply;
  try {
    reply = await fetch(address, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("away", 0, String(error));
  }
  if (reply.ok) return reply.json();
  if ((reply.status === 429 || reply.status === 503) && patience > 0) {
    await new Promise((done) => setTimeout(done, 1000 * Number(reply.headers.get("Retry-After") ?? 1)));
    return ask(address, options, patience - 1);
  }
  const said = await reply.json().catch(() => ({ error: reply.statusText }));
  throw new Trouble(KINDS[reply.status] ?? "failed", reply.status, said.error);
}

function form(files) {
  const body = new FormData();
  for (const file of files) body.append("file", file, file.name);
  return body;
}

export const models = async () => (await ask("/v1/models")).models;

export async function predict(model, files) {
  const address = `/v1/models/${encodeURIComponent(model)}/predict?top=3`;
  return (await ask(address, { method: "POST", body: form(files) })).answers;
}

export async function explain(model, file, { methods, target, attention }, signal) {
  const query = new URLSearchParams({ methods: methods.join(","), attention, top: 5 });
  if (target !== undefined) query.set("target", target);
  const address = `/v1/models/${encodeURIComponent(model)}/explain?${query}`;
  const answer = await ask(address, { method: "POST", body: form([file]), signal });
  for (const map of Object.values(answer.heatmaps)) map.levels = bytes(map.levels);
  if (answer.attention) {
    const sent = answer.attention;
    sent.levels = bytes(sent.levels);
    sent.peaks = shares(sent.peaks);
    sent.elsewhere = shares(sent.elsewhere);
  }
  return answer;
}

function bytes(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

function shares(text) {
  const view = new DataView(bytes(text).buffer);
  return Float32Array.from({ length: view.byteLength / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}
