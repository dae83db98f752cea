// Opens the report of a sweep, unfolds everything and prints its numbers of tables and drawings: node report.mjs URL

import { launch, openWindow } from "./browser.mjs";

const browser = await launch();
const { page } = await openWindow(browser);
await page.goto(process.argv[2]);
await page.$$eval("details", (folded) => folded.forEach((each) => (each.open = true)));
await page.waitForFunction(() => [...document.querySelectorAll("details")].every((each) => each.children.length > 1));
const count = (tag) => page.$$eval(`main ${tag}`, (found) => found.length);
console.log(JSON.stringify([await count("table"), await count("svg")]));
await browser.close();
