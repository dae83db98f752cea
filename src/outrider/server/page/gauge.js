"use strict";

/* Speed: four numbers while an answer comes, a line below it, and the account of the last one. */

const GAUGE_PAUSE_MS = 250; // numbers that change more often cannot be read

class Gauge {
  constructor() {
    this.shown_ms = 0;
    this.plain_s = null;
    this.reply = null;
  }

  /** Seconds that a token takes under plain decoding by the cost curve, null where nobody knows. */
  setPlain(plain_s) {
    this.plain_s = plain_s;
    this.showPlain();
  }

  /** Plain decoding's speed, as it follows from the two numbers beside it: in an answer that has ended the
      server's estimate, before that the cost curve. */
  showPlain() {
    const estimate = this.reply?.report?.estimated_speedup;
    if (estimate) set("plain", number(this.reply.perSecond / estimate.speedup, 1));
    else set("plain", this.plain_s && !this.reply?.report ? number(1 / this.plain_s, 1) : UNKNOWN);
  }

  show(reply, { now = false } = {}) {
    if (!now && performance.now() - this.shown_ms < GAUGE_PAUSE_MS) return;
    this.shown_ms = performance.now();
    this.reply = reply;
    this.showPlain();
    set("rate", number(reply.perSecond, 1));
    set("per-call", number(reply.perCall, 2));
    const estimate = reply.report?.estimated_speedup;
    set("speedup-name", reply.report ? "speed-up, estimated" : "speed-up so far");
    if (estimate) set("speedup", `${number(estimate.speedup, 2)}×`);
    else set("speedup", this.plain_s && !reply.report ? times(reply.perSecond * this.plain_s) : UNKNOWN);
  }

  clear() {
    this.reply = null;
    this.showPlain();
    for (const id of ["rate", "per-call", "speedup"]) set(id, UNKNOWN);
    set("speedup-name", "speed-up");
  }
}

function times(value) {
  return Number.isFinite(value) ? `${number(value, 1)}×` : UNKNOWN;
}

function set(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

/** An answer's numbers in a line, empty where there are none. */
function summaryOf(reply) {
  const parts = reply.generated >= 0 ? [counted(reply.generated, "token")] : [];
  const { target_calls: calls } = reply.counts;
  if (calls >= 0) parts.push(counted(calls, "target call"));
  if (Number.isFinite(reply.perCall)) parts.push(`${parts.pop()}, ${number(reply.perCall, 2)} tokens each`);
  const estimate = reply.report?.estimated_speedup;
  if (estimate) parts.push(`about ${speedupOf(estimate)} over plain decoding`);
  if (Number.isFinite(reply.perSecond)) parts.push(`${number(reply.perSecond, 1)} tokens/s`);
  return parts.join(" · ");
}

function speedupOf({ speedup, low, high }) {
  return `${number(speedup, 2)}× (${number(low, 2)}–${number(high, 2)})`;
}

/** The account of an answer: calls, drafts and times, then each drafter. One that was stopped has the counts that
    came until then. */
function accountOf({ report, usage, counts }) {
  if (!(counts.target_calls >= 0)) {
    return element("p", { class: "hint" }, "The server gave no account of this answer.");
  }
  const rows = [
    ["Prompt tokens", number(usage?.prompt_tokens)],
    ["Of these kept from before", number(counts.reused_prompt_tokens)],
    ["Tokens", number(usage?.completion_tokens ?? counts.generated_tokens)],
    ["Target calls", number(counts.target_calls)],
    ["Draft model calls", number(counts.draft_calls)],
    ["Drafted", number(counts.drafted_tokens)],
    ["Accepted", shareOf(counts.accepted_tokens, counts.drafted_tokens)],
    ["Forced by grammar", number(counts.forced_tokens)],
    ["Reading the prompt", duration(report?.times.prefill_s)],
    ["Writing", duration(report?.times.decode_s)],
    ["Bit-equal to plain decoding", report ? (report.bitwise ? "yes" : "no") : UNKNOWN],
    ["Over plain decoding", overPlain(report)],
  ].filter(([, value]) => value !== UNKNOWN);
  const why = report?.estimated_speedup_unknown;
  const notes = [
    !report && "The answer did not come to its end: these are the counts until then.",
    why && `The speed-up is not known: ${why}.`,
    ...(report?.notices ?? []),
  ].filter(Boolean);
  const lines = rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
  return element(
    "div",
    {},
    element("dl", { class: "account" }, ...lines),
    draftersOf(counts.drafters ?? {}),
    ...notes.map((note) => element("p", { class: "note" }, note)),
  );
}

function overPlain(report) {
  if (!report) return UNKNOWN;
  return report.estimated_speedup ? speedupOf(report.estimated_speedup) : "not known";
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
