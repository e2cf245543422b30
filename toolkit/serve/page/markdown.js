// Markdown as DOM nodes. What a model writes only ever becomes text nodes, so none of it can be markup or run.

const DEPTH = 12; // of quotes and lists in one another; what lies deeper is a paragraph
// None of these may try one blank, or one mark, in two places: a line of n of them would take n² steps.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})([^]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s([^]*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;

// Bounded repeats: a text without ends costs no more than its length times the bound.
const INLINE = new RegExp(
  [
    /\\(?<escaped>[\\`*_{}[\]()#+\-.!~|<>$])/,
    /(?<!`)(?<ticks>`+)(?<code>[^`](?:.{0,500}?[^`])?)\k<ticks>(?!`)/,
    /\*\*\*(?<both>[^\s*](?:.{0,500}?\S)?)\*\*\*/,
    /\*\*(?<strong>[^\s*](?:.{0,500}?\S)?)\*\*/,
    /(?<!\w)__(?<strong2>[^\s_](?:.{0,500}?\S)?)__(?!\w)/,
    /\*(?<em>[^\s*](?:[^*\n]{0,500}?[^\s*])?)\*/,
    /(?<!\w)_(?<em2>[^\s_](?:[^_\n]{0,500}?[^\s_])?)_(?!\w)/,
    /~~(?<gone>[^\s~](?:.{0,500}?\S)?)~~/,
    /!?\[(?<label>[^[\]\n]{0,500})\]\((?<target>[^\s()]{1,500}(?:\([^\s()]{0,500}\)[^\s()]{0,500}){0,5})(?:\s+"[^"\n]{0,500}")?\)/,
    /(?<url>https?:\/\/[^\s<>"'`]{0,500}[^\s<>"'`.,;:!?)\]}*_~|])/,
    /(?<br><br\s?\/?>)/,
  ].map((part) => part.source).join("|"),
  "gs",
);

/** Show `text` in `element`; only blocks that changed since the last call are made anew. */
export function show(element, text) {
  const blocks = split(text.split("\n"));
  const shown = element.blocks ?? [];
  const sources = blocks.map((block) => block.kind + block.lines.join("\n"));
  let same = 0;
  while (same < sources.length && sources[same] === shown[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(render(block, 0));
  element.blocks = sources;
}

/** Lines as blocks {kind, lines}. */
function split(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [kind, end] = extent(lines, i);
    blocks.push({ kind, lines: lines.slice(i, end) });
    i = end;
  }
  return blocks;
}

/** [kind, index behind it] of the block that begins at line `i`. */
function extent(lines, i) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) {
    let end = i + 1;
    while (end < lines.length && !closes(lines[end], fence[1])) end++;
    return ["code", Math.min(end + 1, lines.length)];
  }
  if (HEADING.test(line)) return ["heading", i + 1];
  if (RULE.test(line)) return ["rule", i + 1];
  if (QUOTE.test(line)) return ["quote", ahead(lines, i, (next) => QUOTE.test(next))];
  if (ITEM.test(line)) return ["list", listEnd(lines, i)];
  if (line.includes("|") && i + 1 < lines.length && rulesTable(lines[i + 1])) {
    return ["table", ahead(lines, i, (next) => next.includes("|"))];
  }
  return ["paragraph", ahead(lines, i, (next) => next.trim() && !interrupts(next))];
}

function ahead(lines, i, goesOn) {
  let end = i + 1;
  while (end < lines.length && goesOn(lines[end])) end++;
  return end;
}

function rulesTable(line) {
  return line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
}

function closes(line, fence) {
  const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
  return Boolean(found) && found[1][0] === fence[0] && found[1].length >= fence.length;
}

function interrupts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

const numbered = (item) => /\d/.test(item[2]);

function listEnd(lines, i) {
  const first = ITEM.exec(lines[i]);
  let inside = first[0].length; // as in `list`
  let end = i + 1;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && item[1].length < inside) {
      if (numbered(item) !== numbered(first)) break; // that is another list, and numbers go on behind it
      inside = item[0].length;
    }
    if (!line.trim()) {
      const next = ahead(lines, end, (each) => !each.trim());
      if (next >= lines.length || !(/^ {2,}\S/.test(lines[next]) || ITEM.test(lines[next]))) break;
      end = next;
    } else if (/^ {2,}/.test(line) || (ITEM.test(line) && !RULE.test(line)) || !interrupts(line)) end++;
    else break;
  }
  return end;
}

function render({ kind, lines }, depth) {
  const deeper = (inner) => (depth < DEPTH ? split(inner).map((b) => render(b, depth + 1)) : inline(inner.join("\n")));
  switch (kind) {
    case "code": return code(lines);
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      return make(`h${marks.length}`, {}, ...inline((text ?? "").trim().replace(/(^|\s)#+$/, "").trimEnd()));
    }
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, ...deeper(lines.map((line) => line.replace(QUOTE, ""))));
    case "list": return list(lines, deeper);
    case "table": return table(lines);
    default: return make("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
  }
}

function code(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = make("button", { className: "quiet", type: "button", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(text, copy));
  const head = make("div", { className: "row" }, make("span", { textContent: language.trim().split(/\s/)[0] }), copy);
  return make("div", { className: "code" }, head, make("pre", {}, make("code", { textContent: text })));
}

function list(lines, deeper) {
  const first = ITEM.exec(lines[0]);
  const ordered = numbered(first);
  const items = [];
  let inside = 2; // how far an item's own lines are indented
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && (!items.length || found[1].length < inside)) {
      inside = found[0].length;
      items.push([line.slice(inside)]);
    } else items.at(-1).push(line.replace(new RegExp(`^ {0,${inside}}`), ""));
  }
  const made = make(ordered ? "ol" : "ul", {}, ...items.map((item) => make("li", {}, ...tight(item, deeper))));
  if (ordered) made.start = parseInt(first[2], 10);
  return made;
}

/** An item of one paragraph needs no paragraph around it. */
function tight(item, deeper) {
  const made = deeper(item);
  return made.flatMap((node, i) => (i === 0 && node.tagName === "P" ? [...node.childNodes] : [node]));
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function table(lines) {
  const sides = cells(lines[1]).map((rule) => (/^:.*:$/.test(rule) ? "center" : rule.endsWith(":") ? "right" : ""));
  const row = (tag) => (line) =>
    make("tr", {}, ...cells(line).map((cell, i) => make(tag, { className: sides[i] ?? "" }, ...inline(cell))));
  const body = make("tbody", {}, ...lines.slice(2).map(row("td")));
  return make("div", { className: "table" }, make("table", {}, make("thead", {}, row("th")(lines[0])), body));
}

function inline(text, depth = 0) {
  const nodes = [];
  let from = 0;
  const inner = (part) => (depth < DEPTH ? inline(part, depth + 1) : [part]);
  for (const found of text.matchAll(INLINE)) {
    const g = found.groups;
    if (found.index > from) nodes.push(text.slice(from, found.index));
    from = found.index + found[0].length;
    if (g.escaped) nodes.push(g.escaped);
    else if (g.code) nodes.push(make("code", { textContent: g.code }));
    else if (g.both) nodes.push(make("em", {}, make("strong", {}, ...inner(g.both))));
    else if (g.strong ?? g.strong2) nodes.push(make("strong", {}, ...inner(g.strong ?? g.strong2)));
    else if (g.em ?? g.em2) nodes.push(make("em", {}, ...inner(g.em ?? g.em2)));
    else if (g.gone) nodes.push(make("del", {}, ...inner(g.gone)));
    else if (g.br) nodes.push(make("br"));
    else if (g.url) nodes.push(link(g.url, [g.url]) ?? g.url);
    else nodes.push(link(g.target, inner(g.label || g.target)) ?? found[0]);
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** A link that opens elsewhere and tells nothing of this page; null for anything but the web and mail. */
function link(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return null;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...label);
}

/** An element with properties and children (nodes or texts). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Copy, and say so on the button for a moment. Without the clipboard (plain http from afar) by a selection. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}
