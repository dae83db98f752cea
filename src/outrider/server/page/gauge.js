"use strict";

/* Speed: four numbers while an answer comes, a line below it, and the account of the last one. */

const GAUGE_PAUSE_MS = 250; // numbers that change more often cannot be read

class Gauge {
  constructor() {
    this.shown_ms = 0;
    this.plain_s = null;
  }

  /** Seconds that a token takes under plain decoding, null where nobody knows. */
  setPlain(plain_s) {
    this.plain_s = plain_s;
    set("plain", plain_s ? number(1 / plain_s, 1) : "–");
  }

  show(reply, { now = false } = {}) {
    if (!now && performance.now() - this.shown_ms < GAUGE_PAUSE_MS) return;
    this.shown_ms = performance.now();
    set("rate", number(reply.perSecond, 1));
    set("per-call", number(reply.perCall, 2));
    const estimate = reply.report?.estimated_speedup;
    set("speedup-name", reply.report ? "speed-up, estimated" : "speed-up so far");
    if (estimate) set("speedup", `${number(estimate.speedup, 2)}×`);
    else set("speedup", this.plain_s && !reply.report ? times(reply.perSecond * this.plain_s) : "–");
  }

  clear() {
    for (const id of ["rate", "per-call", "speedup"]) set(id, "–");
    set("speedup-name", "speed-up");
  }
}

function times(value) {
  return Number.isFinite(value) ? `${number(value, 1)}×` : "–";
}

function set(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

/** An answer's numbers in a line, empty where there are none. */
function summaryOf(reply) {
  const parts = reply.generated >= 0 ? [counted(reply.generated, "token")] : [];
  if (reply.report) {
    const { target_calls: calls } = reply.report;
    const estimate = reply.report.estimated_speedup;
    parts.push(`${counted(calls, "target call")}, ${number(reply.perCall, 2)} tokens each`);
    if (estimate) parts.push(`about ${speedupOf(estimate)} over plain decoding`);
  }
  if (Number.isFinite(reply.perSecond)) parts.push(`${number(reply.perSecond, 1)} tokens/s`);
  return parts.join(" · ");
}

function speedupOf({ speedup, low, high }) {
  return `${number(speedup, 2)}× (${number(low, 2)}–${number(high, 2)})`;
}

/** The account of an answer: calls, drafts and times, then each drafter. */
function accountOf({ report, usage }) {
  if (!report) return element("p", { class: "hint" }, "The server gave no account of this answer.");
  const rows = [
    ["Prompt tokens", number(usage?.prompt_tokens)],
    ["Of these kept from before", number(report.reused_prompt_tokens)],
    ["Tokens", number(usage?.completion_tokens)],
    ["Target calls", number(report.target_calls)],
    ["Draft model calls", number(report.draft_calls)],
    ["Drafted", number(report.drafted_tokens)],
    ["Accepted", shareOf(report.accepted_tokens, report.drafted_tokens)],
    ["Forced by grammar", number(report.forced_tokens)],
    ["Reading the prompt", duration(report.times?.prefill_s)],
    ["Writing", duration(report.times?.decode_s)],
    ["Bit-equal to plain decoding", report.bitwise ? "yes" : "no"],
    ["Over plain decoding", report.estimated_speedup ? speedupOf(report.estimated_speedup) : "not known"],
  ];
  const why = report.estimated_speedup_unknown;
  const notes = [why && `The speed-up is not known: ${why}.`, ...(report.notices ?? [])].filter(Boolean);
  const lines = rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
  return element(
    "div",
    {},
    element("dl", { class: "account" }, ...lines),
    draftersOf(report.drafters ?? {}),
    ...notes.map((note) => element("p", { class: "note" }, note)),
  );
}

function draftersOf(drafters) {
  const rows = inOrder(Object.keys(drafters)).map((name) => {
    const { drafted_tokens: drafted, accepted_tokens: accepted } = drafters[name];
    return [sourceName(name), number(drafted), shareOf(accepted, drafted)];
  });
  return rows.length ? table("By drafter", ["Drafter", "Drafted", "Accepted"], rows) : "";
}

function shareOf(part, whole) {
  return whole ? `${number(part)} (${number((100 * part) / whole)}%)` : number(part);
}
