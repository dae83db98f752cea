"use strict";

/* An answer's text with its sources, and its rendering: only what changed is touched, so that a frame of a
   long answer costs no more than its last blocks. */

/** Text that grows at its end; every character has a source. */
class SourcedText {
  constructor() {
    this.text = "";
    this.runs = []; // {end, source}: neighbours differ
    this.lengths = new Map(); // source -> characters
  }

  push(text, source) {
    if (!text) return;
    this.text += text;
    this.lengths.set(source, (this.lengths.get(source) ?? 0) + text.length);
    const last = this.runs.at(-1);
    if (last?.source === source) last.end = this.text.length;
    else this.runs.push({ end: this.text.length, source });
  }

  /** Bits of text[start:end] with one source each. */
  *split(start, end) {
    let low = 0;
    for (let high = this.runs.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.runs[middle].end <= start) low = middle + 1;
      else high = middle;
    }
    for (let at = start; at < end; low += 1) {
      const { end: runEnd, source } = this.runs[low];
      const stop = Math.min(end, runEnd);
      yield { text: this.text.slice(at, stop), source };
      at = stop;
    }
  }

  /** The atoms of a part: bits of text with source and style, in order; a gap has no source. */
  atoms(segments) {
    return segments.flatMap(([start, end, style, gap], run) => [
      ...(gap ? [{ text: gap, source: null, style, run }] : []),
      ...Array.from(this.split(start, end), (bit) => ({ ...bit, style, run })),
    ]);
  }
}

const STYLE_TAGS = [
  [BOLD, "strong"],
  [ITALIC, "em"],
  [CODE, "code"],
];

/** The inline content of one element; `update` changes it from the first difference on. */
class PartView {
  constructor(node) {
    this.node = node;
    this.shown = [];
  }

  update(atoms) {
    const { shown } = this;
    let same = 0;
    while (same < shown.length && same < atoms.length && isEqual(shown[same], atoms[same])) same += 1;
    if (same === shown.length - 1 && this.grow(shown[same], atoms[same])) same += 1;
    for (const atom of shown.splice(same)) {
      atom.span.remove();
      if (atom.wrapper && !atom.holder.hasChildNodes()) atom.wrapper.remove();
    }
    for (const atom of atoms.slice(same)) this.append(atom);
  }

  /** Whether `atom` is the one that is shown with more text, which is then added. */
  grow(known, atom) {
    if (!atom || !isAlike(known, atom) || !atom.text.startsWith(known.text)) return false;
    known.span.firstChild.appendData(atom.text.slice(known.text.length));
    known.text = atom.text;
    return true;
  }

  append(atom) {
    const before = this.shown.at(-1);
    const isInside = atom.style && before?.style === atom.style && before.run === atom.run;
    const { wrapper, holder } = isInside ? before : this.wrap(atom.style);
    const span = element("span", { class: atom.source && "piece", "data-source": atom.source }, atom.text);
    holder.append(span);
    this.shown.push({ ...atom, span, wrapper, holder });
  }

  wrap(style) {
    let wrapper = null;
    let holder = this.node;
    for (const [bit, tag] of STYLE_TAGS) {
      if (!(style & bit)) continue;
      const made = element(tag);
      holder.append(made);
      holder = made;
      wrapper ??= made;
    }
    return { wrapper, holder };
  }
}

function isAlike(shown, atom) {
  return shown.source === atom.source && shown.style === atom.style && shown.run === atom.run;
}

function isEqual(shown, atom) {
  return isAlike(shown, atom) && shown.text === atom.text;
}

/** One block: an element, and the views of its parts. */
class BlockView {
  constructor(block, literal) {
    this.key = keyOf(block);
    this.shapes = [];
    this.parts = [];
    this.lists = []; // the open lists, outermost first
    [this.node, this.inner] = this.made(block, literal);
  }

  /** Whether a block is this one, perhaps with more parts. */
  fits(block) {
    return this.key === keyOf(block) && this.shapes.every((shape, i) => shape === block.parts[i]?.shape);
  }

  update(block, text) {
    block.parts.forEach((part, i) => {
      if (i === this.parts.length) this.add(block.kind, part.shape);
      this.parts[i].update(text.atoms(part.segments));
    });
  }

  made({ kind, level, language }, literal) {
    if (kind === "heading") return twice(element(`h${Math.min(level + 2, 6)}`));
    if (kind === "rule") return twice(element("hr"));
    if (kind === "list") return twice(element("div", { class: "list" }));
    if (kind === "table") {
      const body = element("tbody");
      const scroller = { class: "table", tabindex: 0, role: "region", "aria-label": "Table" };
      return [element("div", scroller, element("table", {}, body)), body];
    }
    if (kind !== "code") return twice(element("p"));
    const code = element("code");
    const head = element(
      "div",
      { class: "code-head" },
      element("span", {}, language || (literal ? "json" : "")),
      copyButton(() => code.textContent, "Copy code"),
    );
    const scroller = { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" };
    const isJson = literal || language.toLowerCase() === "json";
    return [element("div", { class: isJson ? "code-block json" : "code-block" }, head, element("pre", scroller, code)), code];
  }

  add(kind, shape) {
    this.shapes.push(shape);
    let node = this.inner;
    if (kind === "list") node = this.item(shape);
    if (kind === "table") node = this.cell(shape);
    this.parts.push(new PartView(node));
  }

  item(shape) {
    const [depth, tag, first] = shape.split(" ");
    this.lists.length = Math.min(this.lists.length, Number(depth));
    if (this.lists.length === Number(depth) && this.lists.at(-1).localName !== tag) this.lists.pop();
    if (this.lists.length < Number(depth)) {
      const list = element(tag, { start: tag === "ol" && first !== "1" ? first : null });
      (this.lists.at(-1)?.lastElementChild ?? this.inner).append(list);
      this.lists.push(list);
    }
    const content = element("div");
    this.lists.at(-1).append(element("li", {}, content));
    return content;
  }

  cell(row) {
    if (this.inner.childElementCount === Number(row)) this.inner.append(element("tr"));
    const cell = row === "0" ? element("th", { scope: "col" }) : element("td");
    this.inner.lastElementChild.append(cell);
    return cell;
  }
}

function keyOf({ kind, level = "", language = "" }) {
  return `${kind} ${level} ${language}`;
}

function twice(node) {
  return [node, node];
}

/** The rendering of a SourcedText into a container. `literal`: it is JSON, not Markdown. */
class TextView {
  constructor(container, text, { literal = false } = {}) {
    this.container = container;
    this.text = text;
    this.literal = literal;
    this.views = [];
    this.starts = [];
  }

  /** Show what the text is now. All but the last two blocks can no longer change, and stay as they are. */
  update(open) {
    const settled = Math.max(0, this.views.length - 2);
    const from = this.starts[settled] ?? 0;
    const blocks = parseBlocks(this.text.text, from, { literal: this.literal, open });
    this.starts.splice(settled, Infinity, ...blocks.map(({ start }) => start));
    blocks.forEach((block, i) => this.show(block, settled + i));
    for (const view of this.views.splice(settled + blocks.length)) view.node.remove();
  }

  show(block, place) {
    const known = this.views[place];
    const view = known?.fits(block) ? known : new BlockView(block, this.literal);
    if (known && view !== known) known.node.replaceWith(view.node);
    if (!known) this.container.append(view.node);
    this.views[place] = view;
    view.update(block, this.text);
  }
}
