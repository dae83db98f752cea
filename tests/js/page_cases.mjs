// What the page does, seen from outside. Each exported function is a test; tests/test_page.py runs them.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { settled } from "./browser.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const KEY = "opensesame";

const text = (page, selector) => page.$eval(selector, (node) => node.textContent);
const texts = (page, selector) => page.$$eval(selector, (nodes) => nodes.map((node) => node.textContent));
const value = (page, selector) => page.$eval(selector, (node) => node.value);
const isSeen = (page, selector) => page.$eval(selector, (node) => node.checkVisibility());
const focused = (page) => page.evaluate(() => document.activeElement.id || document.activeElement.textContent);
const idle = (page) => page.waitForFunction(() => document.querySelector("#stop").hidden && !conversation.running);
const last = (page, selector = ".content") => page.$$eval(`.reply ${selector}`, (nodes) => nodes.at(-1).textContent);

async function say(page, message) {
  await page.type("#prompt", message);
  await page.keyboard.press("Enter");
}

async function ask(page, message) {
  await say(page, message);
  await idle(page);
}

async function until(condition, what) {
  for (let i = 0; i < 200; i += 1) {
    if (await condition()) return;
    await new Promise((resolve) => setTimeout(resolve, 25));
  }
  assert.fail(`it never came to this: ${what}`);
}

async function press(page, name) {
  const found = await page.$$(`::-p-aria([name="${name}"][role="button"])`);
  await found.at(-1).click();
}

async function setField(page, selector, content) {
  await page.$eval(selector, (node, content) => {
    node.value = content;
    for (const type of ["input", "change"]) node.dispatchEvent(new Event(type, { bubbles: true }));
  }, content);
}

// Streaming and what it shows

export async function an_answer_is_shown_while_it_comes({ open, seen }) {
  const page = await open();
  await say(page, "slow please");
  await page.waitForFunction(() => /More and more\. More/.test(document.querySelector(".content").textContent));
  assert.equal(await isSeen(page, "#stop"), true);
  assert.equal(await isSeen(page, "#send"), false);
  await page.waitForFunction(() => /^[\d.]+$/.test(document.querySelector("#rate").textContent));
  assert.equal(await text(page, "#per-call"), "3.00");
  assert.equal(await text(page, "#speedup-name"), "speed-up so far");
  assert.equal((await seen())[0].left, false);
}

export async function numbers_at_the_end_are_those_of_the_server({ open, seen }) {
  const page = await open();
  assert.match(await text(page, "#models"), /Stand-in-7B with draft Stand-in-0\.5B/);
  assert.equal(await text(page, "#plain"), "20.0");
  await ask(page, "Hello");
  assert.match(await last(page), /^You said: Hello/);
  assert.equal(await text(page, "#rate"), "50.0");
  assert.equal(await text(page, "#per-call"), "3.00");
  assert.equal(await text(page, "#speedup"), "2.50×");
  assert.equal(await text(page, "#plain"), "20.0"); // 50.0 / 2.50, whatever the costs are by now
  const summary = "120 tokens · 40 target calls, 3.00 tokens each · about 2.50× (2.40–2.60) over plain decoding · 50.0 tokens/s";
  assert.equal(await text(page, ".summary"), summary);
  const account = await text(page, "#account");
  for (const part of ["Accepted80 (67%)", "Bit-equal to plain decodingyes", "Draft model calls95", "draft model9060 (67%)", "lookup3020 (67%)"]) {
    assert.ok(account.includes(part), account);
  }
  const [{ body }] = await seen();
  assert.deepEqual(body, {
    model: "Stand-in-7B",
    messages: [{ role: "user", content: "Hello" }],
    stream: true,
    stream_options: { include_usage: true },
    speculation: { show_sources: true },
  });
}

export async function events_may_be_cut_anywhere({ open }) {
  const page = await open();
  await ask(page, "torn");
  assert.equal(await last(page), "Käse 🧀.");
  assert.equal(await isSeen(page, ".reply .complaint"), false);
}

export async function a_server_that_tells_nothing_is_shown_as_such({ open }) {
  const page = await open("/bare/");
  assert.equal(await text(page, "#plain"), "–");
  assert.match(await text(page, "#chart"), /not known yet/);
  assert.match(await text(page, "#models"), /without a draft model/);
  assert.equal(await page.$eval("#policy [value=model]", (option) => option.disabled), true);
  assert.equal(await page.$eval("#bitwise", (input) => input.disabled), true);
  assert.match(await text(page, "#bitwise-note"), /started without --bitwise/);
  await ask(page, "untold");
  assert.equal(await last(page), "Nothing is known.");
  assert.deepEqual(await texts(page, "#legend .piece"), ["target model", "not told"]);
  for (const id of ["#rate", "#speedup", "#per-call"]) assert.equal(await text(page, id), "–");
  assert.match(await text(page, "#account"), /no account/);
}

export async function reasoning_and_tool_calls_fold({ open }) {
  const page = await open();
  await ask(page, "think");
  assert.equal(await last(page), "Four.");
  assert.deepEqual(await texts(page, ".fold summary"), ["Reasoning", "Tool call: add"]);
  assert.deepEqual(await texts(page, ".fold pre"), ["Let me see. Two and two.", '{\n  "a": 2,\n  "b": 2\n}']);
  assert.equal(await isSeen(page, ".fold pre"), false);
  await page.click(".fold summary");
  assert.equal(await isSeen(page, ".fold pre"), true);
}

// Sources

const SOURCES = ["target", "draft", "lookup", "earlier", "corpus", "prediction", "grammar", "oracle"];
const looks = (page) =>
  page.$$eval(".content .piece", (nodes) =>
    Object.fromEntries(nodes.map((node) => {
      const { textDecorationLine: line, textDecorationStyle: style, textDecorationColor: colour, backgroundColor } =
        getComputedStyle(node);
      return [node.dataset.source, { line, form: line === "none" ? "none" : `${line} ${style}`, colour, backgroundColor }];
    })),
  );

export async function sources_differ_with_and_without_colour({ open }) {
  const page = await open();
  await ask(page, "rich");
  const marked = await looks(page);
  assert.deepEqual(Object.keys(marked).sort(), [...SOURCES].sort());
  assert.equal(marked.target.form, "none");
  assert.equal(new Set(Object.values(marked).map(({ form }) => form)).size, SOURCES.length);
  const others = SOURCES.slice(1).map((source) => marked[source]);
  assert.equal(new Set(others.map(({ colour }) => colour)).size, others.length);
  assert.equal(new Set(others.map(({ backgroundColor }) => backgroundColor)).size, others.length);
}

export async function the_legend_names_the_sources_and_switches_them_off({ open }) {
  const page = await open();
  assert.deepEqual(await texts(page, "#legend .piece"), ["target model", "draft model", "lookup", "earlier texts"]);
  await ask(page, "rich");
  const names = ["target model", "draft model", "lookup", "earlier texts", "files", "expected answer", "forced by grammar", "oracle"];
  assert.deepEqual(await texts(page, "#legend .piece"), names);
  const shares = (await texts(page, "#legend .share")).map((share) => parseInt(share, 10));
  assert.ok(Math.abs(shares.reduce((a, b) => a + b) - 100) <= 4, String(shares));
  await page.click(".switch");
  const isPlain = (found) => Object.values(found).every(({ line }) => line === "none");
  assert.ok(isPlain(await looks(page)));
  await page.reload();
  await settled(page);
  assert.equal(await page.$eval("#colours", (box) => box.checked), false);
  await ask(page, "rich");
  assert.ok(isPlain(await looks(page)));
}

export async function markdown_keeps_every_source({ open }) {
  const page = await open();
  await ask(page, "rich");
  const shape = await page.$$eval(".content > *", (nodes) => nodes.map((node) => node.localName + (node.className && `.${node.className}`)));
  assert.deepEqual(shape, ["h3", "p", "div.list", "div.code-block", "div.table", "p"]);
  assert.equal(await text(page, ".content strong"), "twice a day");
  assert.deepEqual(
    await page.$$eval(".content strong .piece", (nodes) => nodes.map((node) => node.dataset.source)),
    ["target", "draft"],
  );
  assert.equal(await text(page, ".content em"), "Moon");
  assert.deepEqual(await texts(page, ".list > ol > li > ul > li"), ["both bulge", "the Earth turns below them"]);
  assert.equal(await text(page, "pre code"), "def height(hours):\n    return cos(2 * pi * hours / 12.4)");
  assert.equal(await text(page, ".code-head span"), "python");
  assert.deepEqual(await texts(page, ".content th"), ["tide", "hours"]);
  assert.deepEqual(await texts(page, ".content td"), ["high", "0", "low", "6.2"]);
  assert.equal(await text(page, "td code"), "0");
}

export async function markdown_is_read_as_written({ open }) {
  const page = await open();
  const read = (source) =>
    page.evaluate((source) => {
      const container = document.createElement("div");
      const text = new SourcedText();
      text.push(source, "draft");
      new TextView(container, text).update(false);
      for (const node of container.querySelectorAll("*")) {
        for (const name of node.getAttributeNames()) node.removeAttribute(name);
      }
      container.querySelectorAll(".code-head, button").forEach((node) => node.remove());
      return container.innerHTML.replaceAll(/<\/?(span|div)>|Copy code/g, "");
    }, source);
  const expected = {
    "a **b** c": "<p>a <strong>b</strong> c</p>",
    "**bold `code` on**": "<p><strong>bold </strong><strong><code>code</code></strong><strong> on</strong></p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "2 * 3 * 4 and a*b*c and snake_case_name": "<p>2 * 3 * 4 and a*b*c and snake_case_name</p>",
    "_so_ and __so__": "<p><em>so</em> and <strong>so</strong></p>",
    "no **end and `none": "<p>no **end and `none</p>",
    "``a ` b``": "<p><code>a ` b</code></p>",
    "\\*not\\* 1 \\ 2": "<p>*not* 1 \\ 2</p>",
    "#tag\n## Head": "<p>#tag</p><h4>Head</h4>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "- a\n- b\n  more\n\n- c\n\nend": "<ul><li>a</li><li>b\nmore</li><li>c</li></ul><p>end</p>",
    "3. c\n4. d": "<ol><li>c</li><li>d</li></ol>",
    "- a\n1. b": "<ul><li>a</li></ul><ol><li>b</li></ol>",
    "* a\n    * b\n        * c\n* d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    "1. a\n   ```\n   x\n     y\n   ```\n2. b": "<ol><li>a</li></ol><pre><code>x\n  y</code></pre><ol><li>b</li></ol>",
    "---": "<hr>",
    "````\n```\n````\nafter": "<pre><code>```</code></pre><p>after</p>",
    "```\n**raw** <b>": "<pre><code>**raw** &lt;b&gt;</code></pre>",
    "| a \\| b | c": "<table><tbody><tr><th>a | b</th><th>c</th></tr></tbody></table>",
    "  \n\n": "",
  };
  for (const [source, html] of Object.entries(expected)) assert.equal(await read(source), html, source);
}

export async function growing_text_ends_as_if_it_had_come_at_once({ open }) {
  const page = await open();
  const wrong = await page.evaluate(() => {
    let state = 7;
    const random = (n) => (state = (state * 48271) % 2147483647) % n;
    const bits = ["**", "*", "`", "```", "\n", "\n\n", "- ", "1. ", "  ", "# ", "|", "---", "_", "\\", " ", "a", "word", "~~~", "12", "é🧀", "<b>"];
    const html = (grow, pieces) => {
      const container = document.createElement("div");
      const text = new SourcedText();
      const view = new TextView(container, text);
      for (const [bit, source] of pieces) {
        text.push(bit, source);
        if (grow && random(3)) view.update(true);
      }
      view.update(false);
      return container.innerHTML;
    };
    for (let i = 0; i < 1500; i += 1) {
      const pieces = Array.from({ length: random(40) }, () => [bits[random(bits.length)], ["target", "draft"][random(2)]]);
      const [grown, whole] = [html(true, pieces), html(false, pieces)];
      if (grown !== whole) return { text: pieces.map(([bit]) => bit).join(""), grown, whole };
    }
    return null;
  });
  assert.deepEqual(wrong, null);
}

export async function long_answers_leave_what_is_settled_alone({ open }) {
  const page = await open();
  await page.evaluate(() => {
    window.changes = { frames: 0, settled: 0, read: 0 };
    const parse = parseBlocks;
    let known = 0;
    parseBlocks = (text, from, options) => {
      window.changes.read = Math.max(window.changes.read, known - from);
      known = text.length;
      return parse(text, from, options);
    };
    const ask = window.requestAnimationFrame.bind(window);
    window.requestAnimationFrame = (work) => ask((at) => ((window.changes.frames += 1), work(at)));
    new MutationObserver((records) => {
      for (const { target } of records) {
        const content = document.querySelector(".content");
        const block = [...(content?.children ?? [])].findIndex((node) => node !== target && node.contains(target));
        if (block >= 0 && block < (window.blocks ?? 0) - 2) window.changes.settled += 1;
      }
      window.blocks = document.querySelector(".content")?.childElementCount;
    }).observe(document.querySelector("#turns"), { subtree: true, childList: true, characterData: true });
  });
  await ask(page, "long");
  const content = await last(page);
  assert.ok(content.startsWith("word0 word1 ") && content.includes("word3999"), content.slice(-100));
  assert.equal(await page.$$eval(".content > p", (nodes) => nodes.length), 40);
  assert.match(await text(page, ".summary"), /^It ended at the token limit\./);
  const { frames, settled, read } = await page.evaluate(() => window.changes);
  assert.equal(settled, 0);
  assert.ok(read < 3000, `${read} characters were read again`); // two blocks have 1,800
  assert.ok(frames < 2000, `${frames} frames for 2000 chunks`);
  const isAtEnd = () => page.$eval("#talk", (node) => node.scrollHeight - node.scrollTop - node.clientHeight < 60);
  assert.ok(await isAtEnd());
}

export async function a_reader_who_scrolls_up_is_left_there({ open }) {
  const page = await open();
  await ask(page, "long 1500");
  await say(page, "slow");
  await page.waitForFunction(() => conversation.running);
  await page.$eval("#talk", (node) => node.scrollTo(0, 100));
  await page.waitForFunction(() => !document.querySelector("#latest").hidden);
  const before = await last(page);
  await until(async () => (await last(page)).length > before.length + 60, "more text");
  assert.equal(await page.$eval("#talk", (node) => node.scrollTop), 100);
  await page.click("#latest");
  assert.ok(await page.$eval("#talk", (node) => node.scrollHeight - node.scrollTop - node.clientHeight < 60));
}

// Stopping, turns

export async function stopping_keeps_the_text_and_tells_the_server({ open, seen }) {
  for (const stop of ["#stop", "Escape"]) {
    const page = await open();
    await say(page, "slow");
    await page.waitForFunction(() => document.querySelector(".content")?.textContent.length > 30);
    await (stop === "Escape" ? page.keyboard.press(stop) : page.click(stop));
    await idle(page);
    const kept = await last(page);
    assert.match(kept, /^More and more/);
    assert.match(await text(page, ".summary"), /^Stopped\. \d+ tokens/);
    await until(async () => (await seen()).at(-1).left, "the server sees that the client left");
    assert.equal(await focused(page), "prompt");
    await ask(page, "Go on");
    const { messages } = (await seen()).at(-1).body;
    assert.deepEqual(messages, [
      { role: "user", content: "slow" },
      { role: "assistant", content: kept },
      { role: "user", content: "Go on" },
    ]);
  }
}

export async function an_answer_that_was_stopped_has_an_account({ open }) {
  const page = await open();
  await ask(page, "Hello");
  await say(page, "slow");
  await page.waitForFunction(() => document.querySelectorAll(".content")[1]?.textContent.length > 30);
  await page.click("#stop");
  await idle(page);
  const summary = /^Stopped\. (\d+) tokens · (\d+) target calls, 3\.00 tokens each · [\d.]+ tokens\/s$/.exec(await last(page, ".summary"));
  const [tokens, calls] = summary.slice(1).map(Number);
  assert.equal(tokens, 3 * calls);
  const rows = await page.$$eval("#account .account div", (nodes) => nodes.map((node) => [...node.children].map((cell) => cell.textContent)));
  const expected = [["Tokens", tokens], ["Target calls", calls], ["Draft model calls", 4 * calls], ["Drafted", 4 * calls], ["Accepted", `${2 * calls} (50%)`]];
  assert.deepEqual(rows, expected.map(([name, value]) => [name, String(value)]));
  assert.match(await text(page, "#account"), /did not come to its end: these are the counts until then/);
  assert.match(await text(page, "#chart > p"), /checked 5\.00 tokens, .* gave 3\.00/);
}

export async function one_answer_runs_at_a_time({ open, seen }) {
  const page = await open();
  await say(page, "slow");
  await say(page, "second");
  assert.equal(await value(page, "#prompt"), "second");
  assert.equal((await seen()).length, 1);
  await press(page, "New conversation");
  await until(async () => (await seen())[0].left, "the running answer is given up");
  assert.equal(await page.$$eval(".turn", (nodes) => nodes.length), 0);
  assert.equal(await isSeen(page, "#welcome"), true);
  assert.equal(await isSeen(page, "#send"), true);
  await ask(page, " try");
  assert.deepEqual((await seen()).at(-1).body.messages, [{ role: "user", content: "second try" }]);
}

export async function turns_are_edited_and_answered_again({ open, seen }) {
  const page = await open();
  await ask(page, "One");
  await ask(page, "Two");
  await press(page, "Regenerate");
  await idle(page);
  const roles = async () => (await seen()).at(-1).body.messages.map(({ role, content }) => `${role[0]}:${content.trim()}`);
  assert.deepEqual(await roles(), ["u:One", "a:You said: One", "u:Two"]);
  assert.equal(await page.$$eval(".turn", (nodes) => nodes.length), 4);
  await page.$eval(".user .actions button:last-child", (node) => node.click());
  await page.keyboard.press("Escape");
  assert.equal(await focused(page), "Edit");
  await page.keyboard.press("Enter");
  await page.$eval(".editor textarea", (node) => (node.value = "Uno"));
  await page.keyboard.press("Enter");
  await idle(page);
  assert.deepEqual(await roles(), ["u:Uno"]);
  assert.deepEqual(await texts(page, ".said, .content"), ["Uno", "You said: Uno "]);
}

export async function answers_and_code_are_copied({ open, url }) {
  const page = await open();
  await page.browserContext().setPermission(url, { permission: { name: "clipboard-write" }, state: "granted" }, { permission: { name: "clipboard-read" }, state: "granted" });
  await ask(page, "rich");
  await press(page, "Copy code");
  await page.waitForFunction(() => document.querySelector(".code-head button").textContent === "Copied");
  assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^def height/);
  await page.evaluate(() => Object.defineProperty(navigator, "clipboard", { value: undefined })); // as over HTTP
  await press(page, "Copy");
  await page.waitForFunction(() => document.querySelector(".reply .actions button").textContent === "Copied");
  await page.focus("#system");
  await page.keyboard.down("Control");
  await page.keyboard.press("v");
  await page.keyboard.up("Control");
  assert.match(await value(page, "#system"), /^# Tides\n\nThe sea .*\*\*twice a day\*\*/s);
}

// Settings

export async function settings_are_sent({ open, seen }) {
  const page = await open();
  await setField(page, "#system", "Be brief.");
  await setField(page, "#temperature", "0.25");
  await setField(page, "#max-tokens", "64");
  await setField(page, "#seed", "7");
  assert.equal(await isSeen(page, "#max-draft"), false);
  await page.select("#policy", "fixed");
  await setField(page, "#max-draft", "5");
  await setField(page, "#prediction", "as before\n");
  await ask(page, "Hello");
  const { body } = (await seen())[0];
  assert.deepEqual(body.messages[0], { role: "system", content: "Be brief." });
  assert.equal(body.temperature, 0.25);
  assert.equal(body.max_tokens, 64);
  assert.equal(body.seed, 7);
  assert.deepEqual(body.speculation, { show_sources: true, policy: "fixed", max_draft: 5 });
  assert.deepEqual(body.prediction, { type: "content", content: "as before\n" });
  assert.equal("bitwise" in body, false);
  await page.select("#policy", "plain");
  await page.click("#bitwise");
  await ask(page, "Again");
  const again = (await seen())[1].body;
  assert.deepEqual(again.speculation, { show_sources: true, policy: "plain" });
  assert.equal(again.bitwise, true);
}

export async function settings_that_cannot_be_sent_are_named({ open, seen }) {
  const page = await open("/", { width: 400, height: 800 });
  const wrong = [
    ["#temperature", "-1", "The temperature must be a number, 0 or more."],
    ["#max-tokens", "0", "The limit of tokens must be a whole number, 1 or more."],
    ["#seed", "1.5", "The seed must be a whole number, 0 or more."],
    ["#schema", "[1]", "The JSON schema must be an object, in braces."],
  ];
  await page.type("#prompt", "Hello");
  for (const [field, content, sentence] of wrong) {
    await setField(page, field, content);
    await page.focus("#prompt");
    await page.keyboard.press("Enter");
    assert.equal(await text(page, "#complaint"), sentence);
    assert.equal(`#${await focused(page)}`, field);
    assert.equal(await isSeen(page, field), true);
    assert.equal(await page.$eval(field, (node) => node.getAttribute("aria-invalid")), "true");
    await setField(page, field, "");
  }
  assert.equal(await value(page, "#prompt"), "Hello");
  assert.deepEqual(await seen(), []);
  await page.focus("#prompt");
  await page.keyboard.press("Enter");
  await idle(page);
  assert.equal(await isSeen(page, "#complaint"), false);
}

export async function a_schema_is_checked_and_sent({ open, seen }) {
  const page = await open();
  await setField(page, "#schema", '{"type": ');
  assert.match(await text(page, "#schema-note"), /^The JSON schema is not valid JSON: .+\.$/);
  await setField(page, "#schema", "");
  await page.click("#schema-example");
  assert.equal(await text(page, "#schema-note"), "The answer will be JSON of this schema.");
  await ask(page, "json");
  const { response_format: format } = (await seen())[0].body;
  assert.equal(format.type, "json_schema");
  assert.equal(format.json_schema.strict, true);
  assert.deepEqual(format.json_schema.schema, JSON.parse(await value(page, "#schema")));
  const whole = { "*na_me_*": 1, list: [{}, [], 'a, [b: "'] };
  assert.equal(await text(page, ".content code"), JSON.stringify(whole, null, 2));
  assert.deepEqual(JSON.parse(await page.evaluate(() => conversation.turns[1].reply.content.text)), whole);
  assert.match(await text(page, "#account"), /Forced by grammar7.*plain decodingno.*not known: others ran beside it\./);
}

export async function json_is_laid_out_as_it_comes({ open }) {
  const page = await open();
  const wrong = await page.evaluate(() => {
    const value = { a: [1.50, "x, \\ \"y\": {", {}, [], [[]], null], "é\n": { b: true, c: [{ d: -2e5 }] } };
    const expected = JSON.stringify(value, null, 2);
    for (const text of [JSON.stringify(value), JSON.stringify(value, null, "\t "), expected]) {
      if (laidOut(text) !== expected) return laidOut(text);
      const container = document.createElement("div");
      const sourced = new SourcedText();
      const view = new TextView(container, sourced, { literal: true });
      for (const [place, letter] of [...text].entries()) {
        sourced.push(letter, ["target", "draft"][place % 2]);
        view.update(true);
        const shown = container.querySelector("code").textContent;
        if (!expected.startsWith(shown)) return shown;
      }
      const pieces = [...container.querySelectorAll(".piece")].map((node) => node.textContent).join("");
      if (pieces.replaceAll(/\s/g, "") !== text.replaceAll(/\s/g, "")) return pieces;
    }
    return null;
  });
  assert.equal(wrong, null);
}

// Refusals

export async function refusals_and_breaks_are_sentences({ open, url }) {
  const page = await open();
  const said = {
    busy: ["8 requests wait already. Try again in 3 seconds.", ""],
    bad: ["unknown field: foo. Leave it out.", ""],
    mute: ["The server answered 502 and did not say why.", ""],
    fail: ["the engine failed: out of memory. Ask for less.", "So far"],
    end: ["The connection ended before the answer was complete.", "So far"],
    garble: ["The server sent something that cannot be read.", ""],
  };
  for (const [word, [sentence, kept]] of Object.entries(said)) {
    await ask(page, word);
    assert.equal(await last(page, ".complaint"), sentence);
    assert.equal(await last(page), kept);
    assert.equal(await last(page, ".actions button:last-child"), "Try again");
  }
  await page.setOfflineMode(true);
  await ask(page, "Hello");
  assert.equal(await last(page, ".complaint"), "The server cannot be reached. Is it still running?");
  await page.setOfflineMode(false);
  await press(page, "Try again");
  await idle(page);
  assert.match(await last(page), /^You said: Hello/);
  const away = await open("/away/");
  assert.match(await text(away, "#models"), /answered 404/);
}

export async function an_error_goes_when_its_cause_goes({ open, url, forgive }) {
  const page = await open();
  await page.type("#prompt", "Hello");
  await setField(page, "#temperature", "-1");
  await setField(page, "#schema", "[1]");
  await page.focus("#prompt");
  await page.keyboard.press("Enter");
  assert.equal(await text(page, "#complaint"), "The temperature must be a number, 0 or more.");
  await setField(page, "#temperature", "1");
  assert.equal(await text(page, "#complaint"), "The JSON schema must be an object, in braces.");
  assert.equal(await page.$eval("#temperature", (node) => node.getAttribute("aria-invalid")), "false");
  await setField(page, "#schema", "");
  assert.equal(await isSeen(page, "#complaint"), false);
  await setField(page, "#prompt", "");
  await ask(page, "fail");
  assert.equal(await isSeen(page, ".reply .complaint"), true);
  await ask(page, "Hello");
  assert.equal(await page.$$eval(".reply .complaint", (nodes) => nodes.some((node) => node.checkVisibility())), false);
  assert.match((await texts(page, ".summary"))[0], /^It did not come to its end: the engine failed: out of memory/);

  const early = await open("/later/"); // a server that is still loading its models
  assert.match(await text(early, "#models"), /Loading model/);
  await fetch(`${url}/loaded`, { method: "POST" });
  await until(async () => /Stand-in-7B/.test(await text(early, "#models")), "the page sees that it is ready");

  const keyed = await open("/keyed/");
  assert.equal(await isSeen(keyed, "#key-form"), true);
  await keyed.evaluate((key) => apiKey.set(key), KEY); // as where the server needs none by now
  await ask(keyed, "Hello");
  assert.equal(await isSeen(keyed, "#key-form"), false);
  forgive();
}

export async function a_message_without_an_answer_is_not_sent_again({ open, seen }) {
  const page = await open();
  await ask(page, "busy");
  await ask(page, "fail");
  await ask(page, "Hello");
  assert.deepEqual((await seen()).at(-1).body.messages.map(({ content }) => content), ["fail", "So far", "Hello"]);
}

export async function a_key_is_asked_for_and_kept_in_the_tab_alone({ open, seen }) {
  const page = await open("/keyed/");
  assert.equal(await isSeen(page, "#key-form"), true);
  assert.match(await text(page, "#key-label"), /^This server needs an API key\./); // not the words for programs
  await ask(page, "Hello");
  assert.equal(await focused(page), "key");
  await page.keyboard.type("wrong");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#key-label").textContent.includes("does not know"));
  await page.type("#key", KEY);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector(".summary")?.textContent.includes("tokens"));
  assert.match(await last(page), /^You said: Hello/);
  assert.equal(await page.$$eval(".turn", (nodes) => nodes.length), 2);
  assert.equal(await isSeen(page, "#key-form"), false);
  assert.match(await text(page, "#models"), /Stand-in-7B/);
  assert.equal((await seen()).at(-1).authorization, `Bearer ${KEY}`);
  const stored = () => page.evaluate(() => [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]);
  const [session, local, cookie] = await stored();
  assert.ok(session.includes(KEY) && !local.includes(KEY) && !cookie.includes(KEY));
  await press(page, "Forget it");
  assert.ok(!(await stored()).join().includes(KEY));
}

export async function hostile_text_stays_text({ open }) {
  const page = await open();
  await ask(page, "hostile");
  const content = await last(page);
  for (const part of ["<img src=x onerror", "<script>window.pwned=1</script>", "[x](javascript:", "<svg onload", "&lt;i&gt;", "<iframe"]) {
    assert.ok(content.includes(part), content);
  }
  const made = await page.$$eval(".content *", (nodes) => [...new Set(nodes.map((node) => node.localName))].sort());
  assert.deepEqual(made, ["button", "code", "div", "p", "pre", "span", "strong"]);
  assert.equal(await page.evaluate(() => window.pwned), undefined);
}

export async function the_policy_lets_nothing_else_run({ open, forgive }) {
  const page = await open();
  const blocked = await page.evaluate(async () => {
    const found = [];
    document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
    const script = document.createElement("script");
    try {
      document.body.innerHTML = "<p>";
    } catch (error) {
      found.push(error.name);
    }
    try {
      script.textContent = "window.pwned = 1";
      document.body.append(script);
    } catch (error) {
      found.push(error.name);
    }
    await fetch("http://127.0.0.1:9/").catch((error) => found.push(error.name));
    await new Promise((resolve) => setTimeout(resolve, 50));
    return { found, pwned: window.pwned };
  }).catch((error) => ({ found: [String(error)] }));
  assert.equal(blocked.pwned, undefined);
  for (const what of ["TypeError", "require-trusted-types-for", "connect-src"]) assert.ok(blocked.found.includes(what), String(blocked.found));
  assert.ok(forgive().length >= 3);
}

// The cost curve

export async function the_cost_curve_shows_the_working_point({ open }) {
  const page = await open();
  assert.equal(await page.$$eval("#chart circle", (nodes) => nodes.length), 0);
  assert.equal((await page.$eval("#chart .curve", (node) => node.getAttribute("d"))).match(/[ML]/g).length, 32);
  await ask(page, "Hello");
  const point = await page.$eval("#chart .checked", (node) => [Number(node.getAttribute("cx")), Number(node.getAttribute("cy"))]);
  const [x, y] = await page.evaluate(() => [chart.x(4), chart.y(chart.calls_s[3])]); // 1 + 120 drafted / 40 calls
  assert.deepEqual(point, [x, y]);
  assert.match(await text(page, "#chart > p"), /checked 4\.00 tokens, which takes 59 ms .* gave 3\.00; .* 144 ms/);
  await page.click(".behind summary");
  const rows = await page.$$eval(".behind tbody tr", (nodes) => nodes.map((node) => [...node.children].map((cell) => cell.textContent)));
  assert.equal(rows.length, 32);
  assert.deepEqual(rows[0], ["1", "48.00", "1.00"]);
}

// For everyone

async function complaints(page) {
  await page.evaluate(AXE);
  const found = await page.evaluate(() => axe.run({ rules: { "target-size": { enabled: true } } }));
  assert.ok(found.passes.length > 20);
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html, failureSummary }) => `${html}\n${failureSummary}`).join("; ")}`);
}

export async function axe_finds_nothing({ open }) {
  for (const scheme of ["light", "dark"]) {
    for (const width of [1280, 320]) {
      const page = await open("/keyed/", { scheme, width });
      assert.deepEqual(await complaints(page), [], `${scheme} ${width} at first`);
      await page.type("#key", KEY);
      await page.keyboard.press("Enter");
      await ask(page, "rich");
      await ask(page, "think");
      await ask(page, "fail");
      assert.deepEqual(await complaints(page), [], `${scheme} ${width} after answers`);
      await setField(page, "#schema", "{");
      await page.evaluate(() => document.querySelectorAll("details").forEach((node) => (node.open = true)));
      if (width < 1000) await page.click("#panel-button");
      await page.$eval(".user .actions button:last-child", (node) => node.click());
      assert.deepEqual(await complaints(page), [], `${scheme} ${width} with everything open`);
    }
  }
}

export async function it_fits_a_phone({ open }) {
  const page = await open("/", { width: 320, height: 568 });
  const isWithin = () =>
    page.evaluate(() => {
      const tooWide = [...document.querySelectorAll("body *")].filter((node) => {
        const { right, left, width } = node.getBoundingClientRect();
        const isScrolled = node.closest("pre, .table, .unseen, .skip, svg, #legend");
        return width && node.checkVisibility() && !isScrolled && (right > innerWidth + 0.5 || left < -0.5);
      });
      return [document.documentElement.scrollWidth, ...tooWide.map((node) => node.outerHTML.slice(0, 80))];
    });
  assert.deepEqual(await isWithin(), [320]);
  await ask(page, "rich");
  assert.deepEqual(await isWithin(), [320]);
  const height = await page.$eval("#talk", (node) => node.clientHeight);
  assert.ok(height > 200, `the conversation has ${height} pixels`);
  await page.click("#panel-button");
  assert.equal(await isSeen(page, "#temperature"), true);
  assert.equal(await focused(page), "panel");
  const [frame, accent] = await page.evaluate(() => [
    getComputedStyle(byId("panel")).outlineColor,
    getComputedStyle(document.querySelector(".mark")).color,
  ]);
  assert.notEqual(frame, accent);
  assert.deepEqual(await isWithin(), [320]);
  const [box, words] = await page.evaluate(() => {
    const range = document.createRange();
    range.selectNodeContents(document.querySelector(".tick").lastChild);
    return [byId("bitwise"), range].map((node) => node.getBoundingClientRect().toJSON());
  });
  assert.ok(box.right <= words.left && words.left - box.right < 20, `${box.right} ${words.left}`);
  assert.ok(box.top < words.bottom && words.top < box.bottom, "the label stands beside its box");
  await page.keyboard.press("Escape");
  assert.equal(await isSeen(page, "#temperature"), false);
  assert.equal(await focused(page), "panel-button");
}

export async function the_keyboard_is_enough({ open }) {
  const page = await open();
  assert.equal(await focused(page), "prompt");
  await page.keyboard.type("rich");
  await page.keyboard.down("Shift");
  await page.keyboard.press("Enter");
  await page.keyboard.up("Shift");
  assert.equal(await value(page, "#prompt"), "rich\n");
  await page.keyboard.press("Enter");
  await idle(page);
  await page.focus(".skip");
  const path = [await focused(page)];
  for (let i = 0; i < 40; i += 1) {
    await page.keyboard.press("Tab");
    path.push(await page.evaluate(() => {
      const node = document.activeElement;
      if (node === document.body) return "(the end of the page)";
      const { outlineStyle, boxShadow } = getComputedStyle(node.id === "colours" ? node.nextElementSibling : node);
      const around = getComputedStyle(node.parentElement).boxShadow;
      const isMarked = outlineStyle !== "none" || boxShadow !== "none" || around !== "none";
      return `${node.id || node.getAttribute("aria-label") || node.textContent}${isMarked ? "" : " (unseen)"}`;
    }));
    if (path.at(-1) === "schema-example") break;
  }
  assert.deepEqual(path.filter((name) => name.endsWith("(unseen)")), []);
  const wanted = ["Skip to the message box", "new", "theme", "talk", "Copy", "Edit", "Copy code", "Code, python", "Table", "Regenerate", "legend", "colours", "prompt", "send", "panel", "system", "temperature", "policy", "schema"];
  let place = -1;
  for (const name of wanted) {
    const next = path.indexOf(name, place + 1);
    assert.ok(next > place, `${name} in ${path.join(", ")}`);
    place = next;
  }
}

export async function answers_are_spoken_in_sentences({ open }) {
  const page = await open();
  await page.evaluate(() => {
    window.spoken = [];
    new MutationObserver((records) => {
      for (const { addedNodes } of records) window.spoken.push(...[...addedNodes].map((node) => node.textContent));
      window.spokenAt = performance.now();
    }).observe(document.querySelector("#spoken"), { childList: true });
  });
  await ask(page, "rich");
  const spoken = await page.evaluate(() => window.spoken);
  assert.equal(spoken[0], "Answering.");
  assert.match(spoken.slice(1, -1).join(" "), /^Tides.*twice a day.*That is all\.$/s);
  assert.match(spoken.at(-1), /^The answer is complete\. 120 tokens/);
  assert.ok(spoken.length <= 5, String(spoken.length));
  await say(page, "slow");
  const begunAt = await page.evaluate(() => performance.now());
  await page.waitForFunction((before) => window.spoken.length >= before + 2, {}, spoken.length);
  const [begun, during] = await page.evaluate((before) => window.spoken.slice(before), spoken.length);
  assert.equal(begun, "Answering.");
  assert.match(during, /^More .*\.$/s);
  assert.ok((await page.evaluate(() => window.spokenAt)) - begunAt > 1000);
}
