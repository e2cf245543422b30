// Messages as the page shows them.

import { copyText, make, show } from "./markdown.js";
import { pictureElements } from "./pictures.js";

/** The element of a message. `on`: what its buttons do ({edit, retry, go, answerCalls}); `last`: it ends the talk. */
export function messageElement(message, { last, busy, on }) {
  const element = make("article", { className: `message ${message.role}` });
  if (message.role === "user") {
    if (message.images) element.append(make("div", { className: "pictures" }, ...pictureElements(message.images)));
    element.append(make("div", { className: "text", textContent: message.content }));
  } else if (message.role === "tool") {
    element.append(folded(`Result of ${message.name ?? "a tool"}`, make("pre", { className: "text", textContent: message.content })));
  } else {
    element.append(...answerParts(message));
  }
  if (busy && last) return element;
  element.append(actions(message, last, on));
  if (message.role === "assistant" && last && message.tool_calls?.length) element.append(results(message, on));
  return element;
}

/** Bring the element of an answer that is being written up to date. */
export function showAnswer(element, message) {
  const [thoughts, text, calls, end] = element.children;
  const thinks = !message.content && !message.tool_calls;
  showThoughts(thoughts, message, thinks ? "Thinking…" : "Thoughts");
  show(text, message.content);
  text.classList.toggle("waiting", thinks && !message.reasoning_content);
  calls.replaceChildren(...callElements(message));
  end.textContent = stats(message);
}

function answerParts(message) {
  const thoughts = folded("Thoughts", make("div", { className: "text" }), message.unfolded);
  thoughts.addEventListener("toggle", () => (message.unfolded = thoughts.open));
  const text = make("div", { className: "text" });
  const calls = make("div", {}, ...callElements(message));
  showThoughts(thoughts, message, "Thoughts");
  show(text, message.content);
  const end = make("div", { className: "stats" });
  const parts = [thoughts, text, calls, end];
  if (message.error) parts.push(make("p", { className: "error", textContent: message.error }));
  return parts;
}

function showThoughts(element, message, title) {
  element.hidden = !message.reasoning_content;
  element.firstChild.textContent = title;
  if (message.reasoning_content) show(element.lastChild, message.reasoning_content);
}

function callElements(message) {
  return (message.tool_calls ?? []).map((call) =>
    folded(`Calls ${call.function.name}`, make("pre", { className: "text", textContent: pretty(call.function.arguments) }), true),
  );
}

function folded(title, content, open = false) {
  return make("details", { className: "aside", open }, make("summary", { textContent: title }), content);
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function actions(message, last, on) {
  const copy = button("Copy", () => copyText(message.content, copy));
  const made = make("div", { className: "actions" }, copy, button("Edit", () => on.edit()));
  if (message.role === "assistant") made.append(button("Retry", on.retry));
  if (last && message.content && !message.tool_calls && ["length", "stopped"].includes(message.end)) made.append(button("Go on", on.go));
  const told = stats(message);
  if (told) made.append(make("span", { className: "stats", textContent: told }));
  return made;
}

function stats(message) {
  const { tokens, wait, speed } = message.stats ?? {};
  const parts = [];
  if (speed) parts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`);
  if (tokens) parts.push(`${tokens} tokens`);
  if (wait) parts.push(`first after ${wait.toFixed(2)} s`);
  if (message.end === "length") parts.push("cut at its length");
  if (message.end === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

/** A form for what the called tools have returned. */
function results(message, on) {
  const areas = message.tool_calls.map((call) =>
    make("textarea", { rows: 2, ariaLabel: `Result of ${call.function.name}`, placeholder: `What ${call.function.name} returns` }),
  );
  const send = button("Send results", () => on.answerCalls(areas.map((area) => area.value)));
  return make("div", {}, ...areas, send);
}

/** Put an editor of `text` in a message's place; Enter is `label`'s where the user wrote it. `done` gets the new text. */
export function editMessage(element, text, label, done, left) {
  const area = make("textarea", { value: text, rows: Math.min(14, text.split("\n").length + 1), ariaLabel: "Edit the message" });
  const finish = () => done(area.value);
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") left();
    else if (event.key === "Enter" && !event.shiftKey && label === "Send") finish();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const row = make("div", { className: "actions" }, button(label, finish), button("Cancel", left));
  element.replaceChildren(make("div", { className: "edit" }, area, row));
  area.focus();
}

export function button(text, click) {
  const made = make("button", { className: "quiet", type: "button", textContent: text });
  made.addEventListener("click", click);
  return made;
}
