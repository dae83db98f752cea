"use strict";

/* Making elements. Text only ever becomes text nodes: nothing here, or elsewhere, parses it as markup. */

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** An element with attributes (`onclick` is a listener) and children (elements or text). */
function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

/** A table with a caption; the first cell of each row is its header. */
function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const lines = rows.map(([name, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((text) => element("td", {}, text))),
  );
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, head),
    element("tbody", {}, ...lines),
  );
}

const UNKNOWN = "–";

/** A number with so many digits after the point, or a dash where there is none. */
function number(value, digits = 0) {
  if (!Number.isFinite(value)) return UNKNOWN;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Seconds as people read them. */
function duration(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  if (seconds > 0 && seconds < 0.01) return `${number(seconds * 1000, 1)} ms`;
  return seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds, 1)} s`;
}

function counted(count, name) {
  return `${number(count)} ${name}${count === 1 ? "" : "s"}`;
}

/** A copy to the clipboard; also over plain HTTP, where browsers offer no clipboard to pages. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const focused = document.activeElement;
  const box = element("textarea", { class: "unseen", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!copied) throw new Error("this browser does not let pages copy");
}

/** A button that copies what `text()` gives, and says whether it did. */
function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    made.textContent = await copy(text()).then(() => "Copied", () => "Not copied");
    setTimeout(() => (made.textContent = label), 1500);
  });
  return made;
}
