// The page: what is shown, what is being answered, and what keys and buttons do.

import { answer, models } from "./api.js";
import { make } from "./markdown.js";
import { parts, pictureElements, readPicture } from "./pictures.js";
import { openPanel, requestFields, settings, wire } from "./settings.js";
import * as store from "./store.js";
import { button, editMessage, messageElement, showAnswer } from "./view.js";

const $ = (id) => document.getElementById(id);
let talk = store.newTalk(); // the one that is shown
let running = null; // {talk, message, abort, element, kept, gone} of the answer that is being written
let frame = 0;
let shown = []; // pictures that the next question is about

// --- asking

function body(talked) {
  const messages = talked.map(({ reasoning_content, role, tool_calls, tool_call_id, ...said }) => (
    { role, content: parts(said), reasoning_content, tool_calls, tool_call_id }
  ));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const model = $("model").value;
  if (!model) throw new Error("The server has told of no model: is it up, and is the API key in the settings?");
  return { model, messages, ...requestFields() };
}

const said = ({ content, reasoning_content, tool_calls }) => Boolean(content || reasoning_content || tool_calls);

/**
 * Have `messages` answered, or with `goOn`, the last of them, have that answer go on. False where nothing came: the
 * conversation is then as it was before. It is kept once something came: what `messages` leave out is gone then.
 */
async function ask(messages, goOn = null) {
  notice("");
  const before = talk.messages;
  const message = goOn ?? { role: "assistant", content: "" };
  const mine = (running = { talk, message, abort: new AbortController(), element: null, kept: false, gone: false });
  try {
    delete message.error;
    const asked = body(messages);
    talk.messages = goOn ? messages : [...messages, message];
    showTalk();
    await answer(asked, settings.key, mine.abort.signal, message, changed);
  } catch (error) {
    if (error.name === "AbortError") message.end = "stopped";
    else message.error = error.message;
  }
  running = null;
  const came = said(message) || (!message.error && message.end !== "stopped");
  if (!came) {
    mine.talk.messages = before;
    notice(message.error ?? "");
  } else if (!mine.gone) keep(mine.talk);
  mine.talk.id === talk.id ? showTalk() : showList();
  return came || mine.gone;
}

function changed() {
  if (!running.kept && !running.gone && said(running.message)) {
    running.kept = true;
    keep(running.talk);
    showList();
  }
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running?.element) return;
    const low = nearEnd();
    showAnswer(running.element, running.message);
    if (low) toEnd();
  });
}

async function send() {
  const text = $("input").value;
  const images = shown;
  if (!(text.trim() || images.length) || running) return;
  $("input").value = "";
  show([]);
  grow();
  if (await ask([...talk.messages, { role: "user", content: text, ...(images.length && { images }) }])) return;
  $("input").value = [text, $("input").value].filter(Boolean).join("\n"); // refused or stopped, and not lost
  show([...images, ...shown]);
  grow();
}

const stop = () => running?.abort.abort();

/** Show these pictures beside the box, for the next question. */
function show(images) {
  shown = images;
  $("shown").replaceChildren(...pictureElements(shown, (i) => show(shown.filter((_, j) => j !== i))));
  $("shown").hidden = !shown.length;
}

async function addPictures(files) {
  for (const file of files) {
    try {
      const made = await readPicture(file); // meanwhile others may have come, and some been sent
      show([...shown, made]);
    } catch (error) {
      notice(error.message);
    }
  }
}

function keep(which) {
  if (!which.messages.length) return store.forget(which.id);
  which.changed = Date.now();
  try {
    store.keep(which);
  } catch {
    notice("This browser's space for the page is full: export the conversations and delete some.");
  }
}

// --- showing

const nearEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;
const toEnd = () => ($("scroll").scrollTop = $("scroll").scrollHeight);

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showTalk() {
  const low = nearEnd();
  const busy = running?.talk.id === talk.id;
  const made = talk.messages.map((message, i) => {
    const element = messageElement(message, { last: i === talk.messages.length - 1, busy, on: buttons(i) });
    if (running?.message === message) {
      running.element = element;
      showAnswer(element, message);
    }
    return element;
  });
  if (!busy && running) running.element = null;
  $("log").replaceChildren(...(made.length ? made : [make("p", { className: "empty", textContent: "Ask something." })]));
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  document.title = made.length ? `${store.title(talk)} · toolkit` : "toolkit";
  if (low || busy) toEnd();
  showList();
  const lost = document.activeElement === document.body; // what had the focus is gone; a phone's keyboard stays down
  if (lost && !matchMedia("(pointer: coarse)").matches) $("input").focus();
}

function buttons(i) {
  const message = talk.messages[i];
  const made = {
    edit: (text) => {
      const mine = message.role === "user";
      const done = async (text) => {
        if (!text.trim() && !message.images?.length) return;
        const changed = { ...message, content: text };
        const asked = talk;
        if (mine) return (await ask([...talk.messages.slice(0, i), changed])) || asked !== talk || buttons(i).edit(text);
        talk.messages[i] = changed;
        keep(talk);
        showTalk();
      };
      editMessage($("log").children[i], text ?? message.content, mine ? "Send" : "Save", done, showTalk);
    },
    retry: () => ask(talk.messages.slice(0, i)),
    go: () => ask(talk.messages, message),
    answerCalls: (texts) => {
      const results = message.tool_calls.map((call, j) => (
        { role: "tool", tool_call_id: call.id, name: call.function.name, content: texts[j] }
      ));
      ask([...talk.messages, ...results]);
    },
  };
  const whenFree = (act) => (...given) => running || act(...given); // one answer at a time
  return Object.fromEntries(Object.entries(made).map(([name, act]) => [name, whenFree(act)]));
}

function showList() {
  const wanted = $("search").value.trim().toLowerCase();
  const has = (one) => one.messages.some((message) => message.content.toLowerCase().includes(wanted));
  const items = store.talks().filter((one) => !wanted || has(one)).map((one) => {
    const open = button(store.title(one), () => openTalk(running?.talk.id === one.id ? running.talk : (store.find(one.id) ?? store.newTalk())));
    const remove = button("", () => removeTalk(one));
    remove.append($("side-close").firstElementChild.cloneNode(true));
    remove.ariaLabel = `Delete ${store.title(one)}`;
    return make("div", { className: one.id === talk.id ? "item on" : "item" }, open, remove);
  });
  $("list").replaceChildren(...items);
}

function openTalk(one) {
  talk = one;
  aside(false);
  notice("");
  showTalk();
  toEnd();
  $("input").focus();
}

function removeTalk(one) {
  if (!confirm(`Delete "${store.title(one)}"?`)) return;
  if (running?.talk.id === one.id) {
    running.gone = true;
    stop();
  }
  store.forget(one.id);
  if (one.id === talk.id) talk = store.newTalk();
  showTalk();
}

function aside(open) {
  $("side").classList.toggle("open", open);
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

// --- models

async function showModels() {
  notice("");
  try {
    const names = await models(settings.key);
    $("model").replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
    if (names.includes(settings.model)) $("model").value = settings.model;
  } catch (error) {
    notice(error.message);
  }
}

// --- buttons and keys

const startNew = () => openTalk(store.newTalk());
$("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startNew);
$("attach").addEventListener("click", () => $("pictures").click());
$("pictures").addEventListener("change", async () => {
  await addPictures($("pictures").files);
  $("pictures").value = "";
  $("input").focus();
});
for (const [kind, given] of [["paste", "clipboardData"], ["drop", "dataTransfer"]]) {
  addEventListener(kind, (event) => {
    const files = [...event[given].files];
    const text = kind === "paste" && event[given].getData("text/plain"); // cells of a table come as a picture, too
    if (!files.length || text) return;
    event.preventDefault();
    addPictures(files);
  });
}
addEventListener("dragover", (event) => event.preventDefault());
$("search").addEventListener("input", showList);
$("side-open").addEventListener("click", () => aside(true));
$("side-close").addEventListener("click", () => aside(false));
$("input").addEventListener("input", grow);
$("model").addEventListener("change", () => {
  settings.model = $("model").value;
  store.keepSettings(settings);
});
$("export").addEventListener("click", () => {
  const href = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  make("a", { href, download: "conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
});
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  try {
    const count = store.imported(await $("file").files[0].text());
    notice(`${count} conversations imported.`);
  } catch (error) {
    notice(error.message);
  }
  $("file").value = "";
  const shown = store.find(talk.id);
  if (shown && !running) talk = shown;
  showTalk();
});
$("input").addEventListener("keydown", (event) => {
  if (event.isComposing) return; // an input method's Enter ends its own word
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("input").value && !running) {
    const last = talk.messages.findLastIndex((message) => message.role === "user");
    if (last >= 0) {
      event.preventDefault();
      buttons(last).edit();
    }
  }
});
addEventListener("keydown", (event) => {
  const held = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !$("settings").open) {
    aside(false);
    stop();
  } else if (held && event.key.toLowerCase() === "k") {
    aside(true);
    $("search").focus();
  } else if (held && event.shiftKey && event.key.toLowerCase() === "o") startNew();
  else if (held && event.key === ",") openPanel();
  else return;
  event.preventDefault();
});
store.watch((id) => {
  const typed = [...$("log").querySelectorAll("textarea")].some((area) => area.value);
  if (id !== talk.id || running || typed) return showList();
  talk = store.find(id) ?? store.newTalk();
  showTalk();
});

addEventListener("pagehide", () => {
  if (!running || running.gone || !said(running.message)) return;
  running.message.end = "stopped";
  keep(running.talk);
});

wire(showModels);
showTalk();
showModels();
