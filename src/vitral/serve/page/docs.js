// The OpenAPI description as a page, made of nothing but itself.
const make = (kind, text = "", name = "") => Object.assign(document.createElement(kind), { textContent: text, className: name });
const described = await (await fetch("/openapi.json")).json();

function resolved(schema) {
  if (!schema) return undefined;
  return schema.$ref ? described.components.schemas[schema.$ref.split("/").pop()] : schema;
}

// A schema as an example-like outline: names with the kind of their values.
function outline(schema, depth = 0) {
  const real = resolved(schema);
  if (!real || depth > 5) return "…";
  if (real.anyOf) return outline(real.anyOf.find((each) => each.type !== "null"), depth);
  if (real.type === "array") return [outline(real.items, depth + 1)];
  if (real.type === "object" && real.properties)
    return Object.fromEntries(Object.entries(real.properties).map(([name, each]) => [name, outline(each, depth + 1)]));
  if (real.type === "object") return { "…": outline(real.additionalProperties, depth + 1) };
  return real.description ?? real.format ?? real.type ?? "…";
}

function list(pairs) {
  const all = make("dl");
  for (const [name, said] of pairs) all.append(make("dt", name), make("dd", said));
  return all;
}

for (const [path, verbs] of Object.entries(described.paths))
  for (const [verb, operation] of Object.entries(verbs)) {
    const box = make("details");
    const head = make("summary");
    head.append(make("span", verb.toUpperCase(), "verb"), ` ${path}`);
    box.append(head, make("p", operation.description ?? operation.summary));
    if (operation.parameters?.length)
      box.append(list(operation.parameters.map((p) => [`${p.in === "query" ? "?" : ""}${p.name}`, [p.description, p.schema?.default !== undefined ? `default: ${p.schema.default}` : ""].filter(Boolean).join("; ") || p.in])));
    const bodies = operation.requestBody?.content;
    if (bodies) box.append(make("h2", "takes"), list(Object.entries(bodies).map(([type, { schema }]) => [type, JSON.stringify(outline(schema))])));
    box.append(make("h2", "answers"), list(Object.entries(operation.responses).map(([status, { description }]) => [status, description])));
    const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
    if (answer) box.append(make("pre", JSON.stringify(outline(answer), null, 2)));
    document.getElementById("addresses").append(box);
  }

const name = await fetch("/v1/models").then((reply) => reply.json()).then(({ models }) => models[0].name).catch(() => "NAME");
document.getElementById("example").textContent = `curl -F file=@photo.jpg ${location.origin}/v1/models/${name}/predict\n\ncurl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' '${location.origin}/v1/models/${name}/predict?top=3'`;
