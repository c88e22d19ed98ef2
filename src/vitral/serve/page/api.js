// Requests to the server.
let apiKey = sessionStorage.getItem("api-key") ?? "";

export function setApiKey(key) {
  apiKey = key;
  sessionStorage.setItem("api-key", key);
}

export class ApiError extends Error {
  constructor(kind, message, predictions = null) {
    super(message);
    this.kind = kind; // key of the text shown for it (i18n.js), or "key": an API key is needed
    this.predictions = predictions; // errors of the single images, if the server sent them
  }
}

// Server error code to the key of the text shown for it; all other codes are "failed".
const ERROR_KINDS = {
  unauthorized: "key",
  unreadable_image: "bad-image",
  unsupported_media_type: "bad-image",
  image_too_large: "too-large",
  body_too_large: "too-large",
  too_many_images: "too-large",
  too_many_requests: "busy",
  too_many_connections: "busy",
  not_ready: "busy",
  timeout: "busy",
};

export const errorKind = (code) => ERROR_KINDS[code] ?? "failed";

// A header is made of bytes: fetch refuses characters above 255, so other keys are sent in UTF-8.
const toHeaderBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function request(url, options = {}, retries = 3) {
  const headers = apiKey ? { Authorization: `Bearer ${toHeaderBytes(apiKey)}` } : {};
  let response;
  try {
    response = await fetch(url, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable", String(error));
  }
  if (response.ok) return response.json();
  if ((response.status === 429 || response.status === 503) && retries > 0) {
    await new Promise((done) => setTimeout(done, 1000 * Number(response.headers.get("Retry-After") ?? 1)));
    return request(url, options, retries - 1);
  }
  const { error, predictions } = await response.json().catch(() => ({}));
  throw new ApiError(errorKind(error?.code), error?.message ?? response.statusText, predictions);
}

function formData(files) {
  const body = new FormData();
  for (const file of files) body.append("file", file, file.name);
  return body;
}

export const listModels = async () => (await request("/v1/models")).models;

// One prediction or error per file. Fails only if the whole request fails.
export async function predict(model, files) {
  const url = `/v1/models/${encodeURIComponent(model)}/predict?top=3`;
  try {
    return (await request(url, { method: "POST", body: formData(files) })).predictions;
  } catch (error) {
    if (error.predictions) return error.predictions;
    throw error;
  }
}

export async function explain(model, file, { methods, target, attention }, signal) {
  const query = new URLSearchParams({ methods: methods.join(","), attention, top: 5 });
  if (target !== undefined) query.set("target", target);
  const url = `/v1/models/${encodeURIComponent(model)}/explain?${query}`;
  const explanation = await request(url, { method: "POST", body: formData([file]), signal });
  for (const heatmap of Object.values(explanation.heatmaps)) heatmap.values = decodeBytes(heatmap.values);
  if (explanation.attention) {
    const weights = explanation.attention;
    weights.values = decodeBytes(weights.values);
    weights.row_max = decodeFractions(weights.row_max);
    weights.non_patch = decodeFractions(weights.non_patch);
  }
  return explanation;
}

function decodeBytes(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// uint16, little-endian; 65535 is 1.
function decodeFractions(base64) {
  const view = new DataView(decodeBytes(base64).buffer);
  return Float32Array.from({ length: view.byteLength / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}
