// The server: its models, and answers as they are written.

async function request(path, key, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not this server's: a proxy's page, say
  }
  throw new Error(response.status === 401 ? `${message}. Give it in the settings.` : message);
}

/** Names of the models that are served. */
export async function models(key) {
  const told = await (await request("v1/models", key)).json();
  return told.data.map((card) => card.id);
}

/**
 * Ask for an answer; each piece goes into `message` {content, reasoning_content, tool_calls, stats, end}, then
 * `changed()` is called. Throws what keeps it from ending; AbortError after `signal`.
 */
export async function answer(body, key, signal, message, changed) {
  const asked = performance.now();
  let first = 0;
  let pieces = 0;
  const measure = (usage) => {
    const seconds = (performance.now() - first) / 1000;
    const tokens = usage?.completion_tokens ?? pieces;
    const wait = usage || pieces ? (first - asked) / 1000 : 0;
    message.stats = { tokens, wait, speed: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0 };
  };
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", key, { method: "POST", body: JSON.stringify(whole), signal });
  for await (const data of events(response.body)) {
    if (data.error) throw new Error(data.error.message);
    const choice = data.choices?.[0];
    if (choice && add(message, choice.delta ?? {})) {
      first ||= performance.now();
      pieces++;
    }
    if (choice?.finish_reason) message.end = choice.finish_reason;
    if (pieces || data.usage) measure(data.usage);
    changed();
  }
}

function add(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    const calls = (message.tool_calls ??= []);
    const call = (calls[part.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
}

/** The JSON of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
