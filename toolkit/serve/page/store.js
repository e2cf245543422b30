// What this browser keeps: each conversation under a key of its own, so that two tabs do not overwrite one another.

const TALK = "toolkit.talk.";
const SETTINGS = "toolkit.settings";
const KEY = "toolkit.key";
const FORMAT = "toolkit.conversations";
const ROLES = ["user", "assistant", "tool"];

export const newTalk = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), changed: Date.now(), messages: [] });

/** All conversations, the newest first. What cannot be read is left where it is. */
export function talks() {
  const found = [];
  for (const name of Object.keys(localStorage)) {
    if (!name.startsWith(TALK)) continue;
    const talk = readTalk(localStorage.getItem(name));
    if (talk) found.push(talk);
  }
  return found.sort((a, b) => b.changed - a.changed);
}

export function find(id) {
  return readTalk(localStorage.getItem(TALK + id));
}

/** Throws where the browser's space for this page is full. */
export function keep(talk) {
  localStorage.setItem(TALK + talk.id, JSON.stringify(talk));
}

export function forget(id) {
  localStorage.removeItem(TALK + id);
}

/** Call `changed` when another tab has changed a conversation. */
export function watch(changed) {
  addEventListener("storage", (event) => event.key?.startsWith(TALK) && changed(event.key.slice(TALK.length)));
}

export function settings() {
  try {
    return { ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}"), key: sessionStorage.getItem(KEY) ?? "" };
  } catch {
    return { key: "" };
  }
}

export function keepSettings({ key, ...others }) {
  localStorage.setItem(SETTINGS, JSON.stringify(others));
  sessionStorage.setItem(KEY, key ?? "");
}

export function title(talk) {
  const text = talk.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  return text.replace(/\s+/g, " ").slice(0, 80) || "New chat";
}

export function exported() {
  return JSON.stringify({ format: FORMAT, version: 1, conversations: talks() }, null, 1);
}

/** Keep the conversations of an exported file; how many there were. A known one is replaced. Throws for another file. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("Import: expected a JSON file that this page has exported");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error(`Import: expected a file with "format": "${FORMAT}"`);
  }
  const checked = data.conversations.map((talk) => readTalk(JSON.stringify(talk)));
  const wrong = checked.indexOf(null);
  if (wrong >= 0) throw new Error(`Import: conversation ${wrong + 1} of the file is not as this page writes them`);
  checked.forEach(keep);
  return checked.length;
}

/** A conversation with the fields this page knows, or null. */
function readTalk(json) {
  try {
    const { id, changed, messages } = JSON.parse(json);
    return typeof id === "string" && Number.isFinite(changed) ? { id, changed, messages: messages.map(readMessage) } : null;
  } catch {
    return null;
  }
}

/** Throws for what is no message. */
function readMessage({ role, content, ...others }) {
  if (!ROLES.includes(role) || typeof content !== "string") throw new TypeError();
  const made = { role, content };
  for (const name of ["reasoning_content", "tool_call_id", "name", "end", "error"]) {
    if (typeof others[name] === "string") made[name] = others[name];
  }
  if (others.images) made.images = others.images.filter((url) => typeof url === "string" && url.startsWith("data:image/"));
  if (others.tool_calls) made.tool_calls = others.tool_calls.map(readCall);
  const { tokens = 0, wait = 0, speed = 0 } = others.stats ?? {};
  made.stats = { tokens: Number(tokens), wait: Number(wait), speed: Number(speed) };
  return made;
}

function readCall({ id, function: { name, arguments: given } }) {
  if (typeof name !== "string" || typeof given !== "string") throw new TypeError();
  return { id: String(id), type: "function", function: { name, arguments: given } };
}
