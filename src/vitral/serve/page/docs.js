// Renders the OpenAPI description without any library.
const create = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
const openapi = await (await fetch("/openapi.json")).json();

function resolve(schema) {
  return schema?.$ref ? openapi.components.schemas[schema.$ref.split("/").pop()] : schema;
}

// The shape of a JSON value: field names with the description or the type of their values.
function outline(schema, depth = 0) {
  const resolved = resolve(schema);
  if (!resolved || depth > 5) return "…";
  if (resolved.anyOf) return outline(resolved.anyOf.find(({ type }) => type !== "null"), depth);
  if (resolved.type === "array") return [outline(resolved.items, depth + 1)];
  if (resolved.type === "object" && resolved.properties)
    return Object.fromEntries(Object.entries(resolved.properties).map(([name, property]) => [name, describe(property, depth)]));
  if (resolved.type === "object") return { "…": outline(resolved.additionalProperties, depth + 1) };
  return resolved.description ?? resolved.format ?? resolved.type ?? "…";
}

function describe(property, depth) {
  const value = outline(property, depth + 1);
  return typeof value === "string" && property.description ? property.description : value;
}

function definitionList(pairs) {
  const list = create("dl");
  for (const [term, definition] of pairs) list.append(create("dt", term), create("dd", definition));
  return list;
}

function parameterList(parameters) {
  return definitionList(
    parameters.map(({ name, in: location, description, schema }) => {
      const defaultValue = schema?.default !== undefined ? `default: ${schema.default}` : "";
      const text = [description, defaultValue].filter(Boolean).join("; ") || location;
      return [location === "query" ? `?${name}` : name, text];
    }),
  );
}

function endpoint(path, method, operation) {
  const details = create("details");
  const summary = create("summary");
  summary.append(create("span", method.toUpperCase(), "method"), ` ${path}`);
  details.append(summary, create("p", operation.description ?? operation.summary));
  if (operation.parameters?.length) details.append(parameterList(operation.parameters));
  const requests = operation.requestBody?.content;
  if (requests) {
    const formats = Object.entries(requests).map(([type, { schema }]) => [type, JSON.stringify(outline(schema))]);
    details.append(create("h2", "Request body"), definitionList(formats));
  }
  const statuses = Object.entries(operation.responses).map(([status, { description }]) => [status, description]);
  details.append(create("h2", "Responses"), definitionList(statuses));
  const success = operation.responses["200"]?.content?.["application/json"]?.schema;
  if (success) details.append(create("pre", JSON.stringify(outline(success), null, 2)));
  return details;
}

for (const [path, methods] of Object.entries(openapi.paths))
  for (const [method, operation] of Object.entries(methods))
    document.getElementById("endpoints").append(endpoint(path, method, operation));

const modelName = await fetch("/v1/models").then((response) => response.json()).then(({ models }) => models[0].name).catch(() => "NAME");
const url = `${location.origin}/v1/models/${modelName}/predict`;
document.getElementById("example").textContent = `curl -F file=@photo.jpg ${url}\n\ncurl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' '${url}?top=3'`;
