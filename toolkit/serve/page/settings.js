// The settings: their panel, what they mean for a request, light and dark.

import * as store from "./store.js";

export const settings = store.settings(); // by the names of the panel's fields; besides theme and model

const panel = document.getElementById("settings");
const sampling = document.getElementById("sampling");
const themes = { auto: "dark", dark: "light", light: "auto" }; // each with the next

/** The fields of a request that are set. Throws for tools that are no JSON list. */
export function requestFields() {
  const made = {};
  for (const { name } of sampling.querySelectorAll("input")) {
    if (settings[name] ?? "") made[name] = Number(settings[name]);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) made.stop = stop;
  if (settings.enable_thinking) made.enable_thinking = settings.enable_thinking === "true";
  if (settings.tools?.trim()) made.tools = readTools(settings.tools);
  return made;
}

function readTools(text) {
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Settings, tools: expected a JSON list (${error.message})`);
  }
  if (!Array.isArray(tools)) throw new Error("Settings, tools: expected a JSON list");
  return tools;
}

export function openPanel() {
  if (!panel.open) panel.showModal();
}

/** Fill the panel and listen to it; `newKey` is called when another API key is given. */
export function wire(newKey) {
  for (const field of panel.querySelectorAll("[name]")) {
    field.value = settings[field.name] ?? "";
    field.addEventListener("change", () => {
      if (!field.reportValidity()) return;
      settings[field.name] = field.value;
      store.keepSettings(settings);
      if (field.name === "key") newKey();
    });
  }
  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    settings.theme = themes[settings.theme] ?? themes.auto;
    store.keepSettings(settings);
    showTheme(theme);
  });
  showTheme(theme);
  document.getElementById("settings-open").addEventListener("click", openPanel);
  document.getElementById("settings-close").addEventListener("click", () => panel.close());
}

function showTheme(button) {
  const theme = themes[settings.theme] ? settings.theme : "auto";
  document.documentElement.dataset.theme = theme;
  button.textContent = { auto: "Auto theme", light: "Light", dark: "Dark" }[theme];
}
