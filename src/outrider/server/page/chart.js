"use strict";

/* The cost curve V(n): how long a target call over n tokens takes, beside n calls over one. Below the
   dashed line a call is cheaper than its tokens would be one by one. */

const WIDTH = 320;
const HEIGHT = 190;
const EDGE = { left: 40, right: 10, top: 12, bottom: 34 };

class CostChart {
  constructor(container) {
    this.container = container;
    this.calls_s = [];
    this.show([]);
  }

  /** Draw V(1), V(2), …, in seconds. */
  show(calls_s) {
    if (this.calls_s.length && this.calls_s.join() === calls_s.join()) return; // the table may be open
    this.calls_s = calls_s;
    if (calls_s.length < 2) {
      const why = "How long calls take here is not known yet: it is measured when a model is first used.";
      this.container.replaceChildren(element("p", { class: "hint" }, why));
      return;
    }
    this.svg = element("div");
    this.caption = element("p", { class: "hint" });
    this.container.replaceChildren(this.svg, this.caption, this.asTable());
    this.mark(NaN, NaN);
  }

  x(n) {
    return EDGE.left + ((n - 1) / (this.calls_s.length - 1)) * (WIDTH - EDGE.left - EDGE.right);
  }

  y(seconds) {
    return HEIGHT - EDGE.bottom - (seconds / this.top_s) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  /** Seconds of a call over n tokens, n perhaps between two whole numbers. */
  at(n) {
    const low = Math.min(Math.max(Math.floor(n), 1), this.calls_s.length - 1);
    const part = Math.min(n - low, 1);
    return this.calls_s[low - 1] * (1 - part) + this.calls_s[low] * part;
  }

  picture(points) {
    const size = this.calls_s.length;
    const last = Math.min(size, this.top_s / this.calls_s[0]);
    const path = this.calls_s.map((s, i) => `${i ? "L" : "M"}${this.x(i + 1)} ${this.y(s)}`).join("");
    const summary =
      `A call over 1 token takes ${duration(this.calls_s[0])}, ` +
      `over ${size} tokens ${duration(this.calls_s.at(-1))}. The table below has all of them.`;
    return drawn(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-labelledby": "chart-title chart-summary" },
      drawn("title", { id: "chart-title" }, "Time of a target call by its number of tokens"),
      drawn("desc", { id: "chart-summary" }, summary),
      ...this.axes(),
      drawn("path", {
        class: "plain-line",
        d: `M${this.x(1)} ${this.y(this.calls_s[0])}L${this.x(last)} ${this.y(last * this.calls_s[0])}`,
      }),
      drawn("path", { class: "curve", d: path }),
      ...this.names(last),
      ...points,
    );
  }

  axes() {
    const size = this.calls_s.length;
    const bottom = HEIGHT - EDGE.bottom;
    const across = [1, ...[1, 2, 3, 4].map((i) => Math.round((size * i) / 4))];
    const step_s = niceStep(this.top_s / 3);
    const digits = step_s < 0.001 ? 1 : 0;
    const up = Array.from({ length: Math.floor(this.top_s / step_s) }, (_, i) => (i + 1) * step_s);
    return [
      ...up.map((s) =>
        drawn("path", { class: "grid", d: `M${EDGE.left} ${this.y(s)}H${WIDTH - EDGE.right}` }),
      ),
      drawn("path", { class: "axis", d: `M${EDGE.left} ${bottom}H${WIDTH - EDGE.right}` }),
      ...up.map((s) => label(EDGE.left - 6, this.y(s) + 3.5, "end", number(s * 1000, digits))),
      ...[...new Set(across)].map((n) => label(this.x(n), bottom + 14, "middle", number(n))),
      label(2, EDGE.top - 2, "start", "ms"),
      label((EDGE.left + WIDTH - EDGE.right) / 2, HEIGHT - 5, "middle", "tokens in the call"),
      label(EDGE.left - 6, bottom + 3.5, "end", "0"),
    ];
  }

  /** What the two lines are; `last` is where the plain one leaves the picture. */
  names(last) {
    const size = this.calls_s.length;
    const place = Math.round(size * 0.72);
    const isSteep = last < size / 2;
    const n = isSteep ? last : last * 0.45;
    const [x, y] = [this.x(n), this.y(n * this.calls_s[0])];
    return [
      isSteep ? label(x + 6, y + 9, "start", "one by one", "name") : label(x - 8, y, "end", "one by one", "name"),
      label(this.x(place), this.y(this.at(place)) + 22, "middle", "one call", "name"),
    ];
  }

  /** The working point: tokens that a call checked and kept in the mean; NaN for what is not known. */
  mark(checked, kept) {
    if (this.calls_s.length < 2) return;
    const isKnown = Number.isFinite(kept) && kept >= 1;
    this.top_s = Math.max(...this.calls_s, isKnown ? kept * this.calls_s[0] : 0) * 1.08;
    const picture = this.picture(isKnown ? this.points(checked, kept) : []);
    this.svg.replaceWith(picture);
    this.svg = picture;
    this.caption.textContent = isKnown
      ? this.sentence(checked, kept)
      : "Solid: one call over n tokens. Dashed: n calls over one token each, as in plain decoding.";
  }

  points(checked, kept) {
    const size = this.calls_s.length;
    const plain = { x: this.x(Math.min(kept, size)), y: this.y(kept * this.calls_s[0]) };
    const tokens = Math.min(Number.isFinite(checked) ? checked : kept, size);
    const paid = { x: this.x(tokens), y: this.y(this.at(tokens)) };
    return [
      drawn("path", { class: "between", d: `M${plain.x} ${plain.y}L${paid.x} ${paid.y}` }),
      drawn("circle", { class: "kept", cx: plain.x, cy: plain.y, r: 4.5 }),
      drawn("circle", { class: "checked", cx: paid.x, cy: paid.y, r: 5 }),
    ];
  }

  sentence(checked, kept) {
    const plain = `written plainly, these would take ${duration(kept * this.calls_s[0])} (ring)`;
    if (!Number.isFinite(checked)) return `So far a call gives ${number(kept, 2)} tokens; ${plain}.`;
    return (
      `A call checked ${number(checked, 2)} tokens, which takes ${duration(this.at(checked))} (dot), ` +
      `and gave ${number(kept, 2)}; ${plain}.`
    );
  }

  asTable() {
    const [plain_s] = this.calls_s;
    const rows = this.calls_s.map((s, i) => [number(i + 1), number(s * 1000, 2), number(s / plain_s, 2)]);
    const heads = ["Tokens", "Milliseconds", "Times a single one"];
    return element(
      "details",
      { class: "behind" },
      element("summary", {}, "As a table"),
      table("Time of a target call", heads, rows),
    );
  }
}

function label(x, y, anchor, text, kind = null) {
  return drawn("text", { x, y, "text-anchor": anchor, class: kind }, text);
}

/** 1, 2 or 5 times a power of ten, at least `step`. */
function niceStep(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * ([1, 2, 5, 10].find((factor) => factor * power >= step) ?? 10);
}
