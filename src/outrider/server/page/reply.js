"use strict";

/* One answer as it comes: what its chunks said, and the rates that follow from that. */

const NOT_TOLD = "not told"; // the source of text whose pieces the server did not name

class Reply {
  constructor({ literal = false } = {}) {
    this.literal = literal;
    this.content = new SourcedText();
    this.reasoning = "";
    this.tools = []; // {name, text}
    this.counts = {}; // of calls and tokens so far, as far as the server says
    this.usage = null;
    this.report = null; // the `outrider` object of the last chunk, with times
    this.finish = null;
    this.error = null;
    this.isRunning = true;
    this.first = null; // {at_s, tokens} of the first chunk that told of tokens
    this.last_s = 0;
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const { pieces = [], ...counts } = chunk.outrider ?? {};
    this.finish = chunk.choices?.[0]?.finish_reason ?? this.finish;
    this.usage = chunk.usage ?? this.usage;
    if (counts.times) this.report = counts;
    Object.assign(this.counts, counts);
    this.takeContent(delta.content ?? "", pieces);
    this.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.takeTool(call);
    this.clock();
  }

  takeContent(content, pieces) {
    if (pieces.map(([text]) => text).join("") !== content) pieces = [[content, NOT_TOLD]];
    for (const [text, source] of pieces) this.content.push(text, source);
  }

  takeTool({ index = 0, function: called = {} }) {
    this.tools[index] ??= { name: "", text: "" };
    this.tools[index].name += called.name ?? "";
    this.tools[index].text += called.arguments ?? "";
  }

  clock() {
    if (!(this.tokens > 0)) return;
    const now_s = performance.now() / 1000;
    this.first ??= { at_s: now_s, tokens: this.tokens };
    this.last_s = now_s;
  }

  get isEmpty() {
    return !this.content.text && !this.reasoning && !this.tools.length;
  }

  /** Tokens so far, NaN while the server has not said. */
  get tokens() {
    return this.counts.generated_tokens ?? NaN;
  }

  /** Tokens of the answer. */
  get generated() {
    return this.usage?.completion_tokens ?? this.tokens;
  }

  /** Tokens per second of decoding: since the first ones came, and the server's own number at the end. */
  get perSecond() {
    if (this.report?.times?.decode_s > 0) return this.generated / this.report.times.decode_s;
    const seconds = this.first ? this.last_s - this.first.at_s : 0;
    return seconds > 0 ? (this.tokens - this.first.tokens) / seconds : NaN;
  }

  get perCall() {
    if (this.report) return this.report.tokens_per_target_call ?? NaN;
    return this.counts.target_calls ? this.tokens / this.counts.target_calls : NaN;
  }

  /** Tokens that a target call evaluated in the mean: the last known one and the draft. */
  get checkedPerCall() {
    const { drafted_tokens: drafted, target_calls: calls } = this.counts;
    return calls ? 1 + drafted / calls : NaN;
  }
}
