"use strict";

/* Who wrote a piece of text. The names come with the answers; these are the ones known today. */

const SOURCE_NAMES = {
  target: "target model",
  draft: "draft model",
  lookup: "lookup",
  earlier: "earlier texts",
  corpus: "files",
  prediction: "expected answer",
  grammar: "forced by grammar",
};

/** A source as people read it; one that is not known goes by its own name. */
function sourceName(source) {
  return Object.hasOwn(SOURCE_NAMES, source) ? SOURCE_NAMES[source] : source;
}

/** Sources in a steady order: the known ones first. */
function inOrder(sources) {
  const known = Object.keys(SOURCE_NAMES);
  const place = (source) => (known.includes(source) ? known.indexOf(source) : known.length);
  return [...new Set(sources)].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

/** The legend: which marking stands for which source, and how much of an answer it wrote. */
class Legend {
  constructor(list) {
    this.list = list;
    this.items = new Map();
  }

  /** Show these sources and those of `lengths` (a Map from source to characters). */
  show(sources, lengths = new Map()) {
    const wanted = inOrder(["target", ...sources, ...lengths.keys()]);
    if (wanted.join("\n") !== [...this.items.keys()].join("\n")) {
      this.items = new Map(wanted.map((source) => [source, this.item(source)]));
      this.list.replaceChildren(...[...this.items.values()].map((item) => item.line));
    }
    const whole = [...lengths.values()].reduce((sum, length) => sum + length, 0);
    for (const [source, { share }] of this.items) {
      const text = lengths.has(source) ? `${number((100 * lengths.get(source)) / whole)}%` : "";
      if (share.data !== text) share.data = text;
    }
  }

  item(source) {
    const share = document.createTextNode("");
    const name = element("span", { class: "piece", "data-source": source }, sourceName(source));
    return { share, line: element("li", {}, name, element("span", { class: "share" }, share)) };
  }
}
