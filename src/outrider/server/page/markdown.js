"use strict";

/* The little Markdown that models write, as positions in the text: nothing is copied or made into markup, so
   that every character keeps its source. Blocks stand side by side and are read line by line, so that a
   growing text can be read again from its last blocks on.

   A block is {kind, start, end, parts}; a part is {shape, segments}; a segment is [start, end, style], where
   style adds up the marks below, and perhaps a gap that is shown before it. What belongs to the notation lies in no segment. */

const BOLD = 1;
const ITALIC = 2;
const CODE = 4;
const REACH = 4000; // characters in which bold or italic text has to be closed

const FENCE = /^(\s*)(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const ROW = /^[ \t]*\|/;
const RULED_ROW = /^[\s:|-]+$/;
const BEGINNINGS = [FENCE, HEADING, RULE, ITEM, ROW];

/** The blocks of `text` from `from` on. `open`: more text will follow; `literal`: all of it is JSON. */
function parseBlocks(text, from, { literal = false, open = false } = {}) {
  if (literal) return [block("code", 0, text.length, [{ shape: "", segments: layOutJson(text) }])];
  const blocks = [];
  for (let at = from; at < text.length; ) {
    const line = lineAt(text, at);
    if (!line.text.trim()) {
      at = line.next;
      continue;
    }
    const found =
      readCode(text, line, open) ??
      readHeading(text, line, open) ??
      readRule(line) ??
      readList(text, line, open) ??
      readTable(text, line, open) ??
      readParagraph(text, line, open);
    blocks.push(found);
    at = found.end;
  }
  return blocks;
}

function block(kind, start, end, parts, extras = {}) {
  return { kind, start, end, parts, ...extras };
}

function lineAt(text, start) {
  const found = text.indexOf("\n", start);
  const end = found < 0 ? text.length : found;
  return { text: text.slice(start, end), start, end, next: found < 0 ? end : end + 1, isLast: found < 0 };
}

function readCode(text, first, open) {
  const fence = FENCE.exec(first.text);
  if (!fence) return null;
  const [, indent, mark, language] = fence;
  const segments = [];
  let at = first.next;
  while (at < text.length) {
    const line = lineAt(text, at);
    const bare = line.text.trim();
    const isFence = bare !== "" && bare === mark[0].repeat(bare.length);
    at = line.next;
    if (isFence && bare.length >= mark.length) break;
    if (isFence && open && line.isLast) continue; // the beginning of the closing fence
    const indented = Math.min(indent.length, line.text.length - line.text.trimStart().length);
    addSegment(segments, line.start + indented, line.next);
  }
  const last = segments.at(-1);
  if (last && text[last[1] - 1] === "\n") last[1] -= 1;
  return block("code", first.start, at, [{ shape: "", segments }], { language });
}

/** One more segment of plain text, joined to the one before where nothing lies between them. */
function addSegment(segments, start, end) {
  const last = segments.at(-1);
  if (last && last[1] === start) last[1] = end;
  else segments.push([start, end, 0]);
}

function readHeading(text, line, open) {
  const found = HEADING.exec(line.text);
  if (!found) return null;
  const segments = inline(text, line.start + found[0].length, line.end, open && line.isLast);
  return block("heading", line.start, line.next, [{ shape: "", segments }], { level: found[1].length });
}

function readRule(line) {
  return RULE.test(line.text) ? block("rule", line.start, line.next, []) : null;
}

function readParagraph(text, first, open) {
  let { end, next } = first;
  while (next < text.length) {
    const line = lineAt(text, next);
    if (!line.text.trim() || BEGINNINGS.some((beginning) => beginning.test(line.text))) break;
    ({ end, next } = line);
  }
  const segments = inline(text, first.start, end, open && next === text.length);
  return block("paragraph", first.start, next, [{ shape: "", segments }]);
}

/** Items with their depth; lines that go on with an item belong to it. */
function readList(text, first, open) {
  if (!ITEM.test(first.text)) return null;
  const parts = [];
  const indents = [];
  let end = first.start;
  let isBehindBlank = false;
  for (let at = first.start; at < text.length; ) {
    const line = lineAt(text, at);
    at = line.next;
    const item = ITEM.exec(line.text);
    const isBlank = !line.text.trim();
    if (isBlank) {
      isBehindBlank = true;
      continue;
    }
    if (item) {
      const shape = itemShape(item, indents);
      const segments = inline(text, line.start + item[0].length, line.end, open && line.isLast);
      parts.push({ shape, segments });
    } else if (goesOn(line.text, isBehindBlank)) {
      const indent = line.text.length - line.text.trimStart().length;
      const rest = inline(text, line.start + indent, line.end, open && line.isLast);
      parts.at(-1).segments.push([line.start - 1, line.start, 0], ...rest);
    } else break;
    isBehindBlank = false;
    end = line.next;
  }
  return block("list", first.start, end, parts);
}

function goesOn(line, isBehindBlank) {
  if (isBehindBlank && !/^[ \t]{2}/.test(line)) return false;
  return !FENCE.test(line) && !HEADING.test(line) && !ROW.test(line);
}

/** "depth ul" or "depth ol number"; `indents` are those of the items that this one lies in. */
function itemShape([, space, mark], indents) {
  const indent = space.replaceAll("\t", "    ").length;
  while (indents.length > 1 && indent < indents.at(-1)) indents.pop();
  if (!indents.length || indent > indents.at(-1) + 1) indents.push(indent);
  const kind = /\d/.test(mark) ? `ol ${parseInt(mark, 10)}` : "ul";
  return `${indents.length} ${kind}`;
}

function readTable(text, first, open) {
  if (!ROW.test(first.text)) return null;
  const parts = [];
  let at = first.start;
  for (let row = 0; at < text.length; ) {
    const line = lineAt(text, at);
    if (!ROW.test(line.text)) break;
    at = line.next;
    if (RULED_ROW.test(line.text)) continue; // what divides the head from the rest, or nothing yet
    for (const [start, end] of cells(line)) {
      parts.push({ shape: `${row}`, segments: inline(text, start, end, open && line.isLast) });
    }
    row += 1;
  }
  return block("table", first.start, at, parts);
}

/** Where the cells of a row begin and end, without the space around their text. */
function* cells(line) {
  const row = line.text.trimEnd();
  let start = row.indexOf("|") + 1;
  while (start < row.length) {
    const bar = /(?<!\\)\|/g;
    bar.lastIndex = start;
    const end = bar.exec(row)?.index ?? row.length;
    const cell = row.slice(start, end);
    const left = line.start + start + (cell.length - cell.trimStart().length);
    yield [left, Math.max(left, line.start + end - (cell.length - cell.trimEnd().length))];
    start = end + 1;
  }
}

/** Segments of text[start:end] with bold, italic and code. `open`: marks may still be closed later. */
function inline(text, start, end, open, style = 0) {
  const found = [];
  const hopeless = new Set(); // marks that nothing closes from here on
  const special = /[\\`*_]+/g;
  let plain = start;
  const take = (at, next, segments) => {
    if (at > plain) found.push([plain, at, style]);
    found.push(...segments);
    plain = next;
    special.lastIndex = next;
  };
  special.lastIndex = start;
  for (let match; (match = special.exec(text)) && match.index < end; ) {
    const at = match.index;
    if (text[at] === "\\") {
      if (/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") && at + 1 < end) {
        take(at, at + 1, []);
        special.lastIndex = at + 2;
      } else special.lastIndex = at + 1;
      continue;
    }
    const run = /^(`+|\*+|_+)/.exec(match[0])[0];
    const marked = hopeless.has(run) ? null : styled(text, at, end, run, open, style);
    if (marked) take(at, marked.next, marked.segments);
    else {
      if (run[0] === "`") hopeless.add(run);
      special.lastIndex = at + run.length;
    }
  }
  if (plain < end) found.push([plain, end, style]);
  return found;
}

/** What the marks at `at` enclose, if anything, and where the text goes on. */
function styled(text, at, end, run, open, style) {
  const isCode = run[0] === "`";
  const mark = isCode ? run : run.slice(0, 2);
  const bit = isCode ? CODE : mark.length === 2 ? BOLD : ITALIC;
  const inner = at + mark.length;
  if (!isCode && (style & bit || !opens(text, at, inner, end, run))) return null;
  let close = isCode ? closingTicks(text, inner, end, run) : closing(text, inner, end, mark);
  if (close < 0) {
    if (!open || inner >= end || bit === ITALIC || /\s/.test(text[inner])) return null;
    close = end;
  }
  const next = Math.min(close + mark.length, end);
  if (isCode) return { next, segments: [[inner, close, style | CODE]] };
  return { next, segments: inline(text, inner, close, open && close === end, style | bit) };
}

function opens(text, at, inner, end, run) {
  const before = at ? text[at - 1] : " ";
  return run.length < 4 && inner < end && !/\s/.test(text[inner]) && !/[\p{L}\p{N}]/u.test(before);
}

function closing(text, inner, limit, mark) {
  const end = Math.min(limit, inner + REACH);
  for (let at = text.indexOf(mark, inner + 1); at >= 0 && at + mark.length <= end; ) {
    let last = at;
    while (text[last + mark.length] === mark[0] && last + mark.length < end) last += 1;
    const run = last - at + mark.length;
    const isWordBehind = mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[last + mark.length] ?? " ");
    const fits = mark.length === 2 || run % 2 === 1;
    if (fits && !/\s/.test(text[at - 1]) && !isWordBehind) return last;
    at = text.indexOf(mark, last + mark.length);
  }
  return -1;
}

function closingTicks(text, inner, end, ticks) {
  const runs = /`+/g;
  runs.lastIndex = inner;
  for (let match; (match = runs.exec(text)) && match.index < end; ) {
    if (match[0] === ticks) return match.index;
  }
  return -1;
}
