"use strict";

/* JSON laid out for reading: a line for each member and element, however it was written. */

const JSON_BIT = /"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}[\],:]|[^\s{}[\],:"]+/gs;

/** Segments of JSON text, [start, end, style, gap]: `gap` is shown before one, in place of the white space that
    was written there. The beginning of a text gives the beginning of its layout. */
function layOutJson(text) {
  const segments = [];
  let depth = 0;
  let before = "";
  for (const { 0: bit, index } of text.matchAll(JSON_BIT)) {
    if (bit === "}" || bit === "]") depth = Math.max(depth - 1, 0);
    const gap = gapBetween(before, bit, depth);
    const last = segments.at(-1);
    if (!gap && last?.[1] === index) last[1] += bit.length;
    else segments.push([index, index + bit.length, 0, gap]);
    if (bit === "{" || bit === "[") depth += 1;
    before = bit;
  }
  return segments;
}

function gapBetween(before, bit, depth) {
  const isEmpty = `${before}${bit}` === "{}" || `${before}${bit}` === "[]";
  if (!before || isEmpty || bit === "," || bit === ":") return "";
  return before === ":" ? " " : `\n${"  ".repeat(depth)}`;
}

/** The text itself, laid out. */
function laidOut(text) {
  return layOutJson(text).map(([start, end, , gap]) => gap + text.slice(start, end)).join("");
}
