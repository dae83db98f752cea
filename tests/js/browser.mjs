// A headless Chromium that tests are run in. Reads a line {name, url} for each, runs that function of
// page_cases.mjs in a window of its own, and answers with a line {error}: null, or what went wrong.

import { createInterface } from "node:readline";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";
import * as cases from "./page_cases.mjs";

const GIVE_UP_MS = 20_000;

export async function launch() {
  // Not the package's own arguments: they switch off what keeps sites apart.
  return puppeteer.launch({
    args: ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none"],
    executablePath: await chromium.executablePath(),
    headless: "shell",
  });
}

/** A window, and what its page must never do: log errors, break its policy, ask other hosts. */
export async function openWindow(browser, { width = 1280, height = 800, scheme = "light", motion = "reduce" } = {}) {
  const context = await browser.createBrowserContext();
  const page = await context.newPage();
  const offences = [];
  page.setDefaultTimeout(GIVE_UP_MS / 2);
  page.on("pageerror", (error) => offences.push(`error: ${error.message}`));
  page.on("console", (message) => {
    const isRefusal = message.text().startsWith("Failed to load resource"); // a status that a case asked for
    if (["error", "warn"].includes(message.type()) && !isRefusal) offences.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    const { protocol, hostname } = new URL(request.url());
    if (protocol !== "data:" && hostname !== "127.0.0.1") offences.push(`request to ${request.url()}`);
  });
  await page.setViewport({ width, height });
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: scheme },
    { name: "prefers-reduced-motion", value: motion },
  ]);
  return { context, page, offences };
}

/** When the page has asked the server who it is. */
export function settled(page) {
  return page.waitForFunction(() => document.querySelector("#models").textContent !== "Connecting…");
}

async function run(browser, { name, url }) {
  const windows = [];
  const open = async (path = "/", options = {}) => {
    const made = await openWindow(browser, options);
    windows.push(made);
    await made.page.goto(url + path);
    await settled(made.page);
    return made.page;
  };
  try {
    await fetch(`${url}/seen`, { method: "DELETE" });
    const seen = async () => (await fetch(`${url}/seen`)).json();
    const forgive = () => windows.flatMap(({ offences }) => offences.splice(0)); // those that a case provoked
    await cases[name]({ open, seen, url, forgive });
    const offences = windows.flatMap((made) => made.offences);
    return offences.length ? offences.join("\n") : null;
  } catch (error) {
    const shown = await Promise.all(windows.map(({ page }) => page.evaluate(() => document.body.innerText.slice(0, 2000)).catch(String)));
    return [error.stack, ...windows.flatMap((made) => made.offences), ...shown].join("\n");
  } finally {
    await Promise.all(windows.map(({ context }) => context.close()));
  }
}

if (import.meta.main) {
  const browser = await launch();
  for await (const line of createInterface({ input: process.stdin })) {
    console.log(JSON.stringify({ error: await run(browser, JSON.parse(line)) }));
  }
  await browser.close();
}
