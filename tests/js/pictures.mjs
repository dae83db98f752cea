// Takes pictures of the page: node pictures.mjs URL FOLDER [MESSAGE …]; the messages are sent, at temperature 0.

import { mkdirSync } from "node:fs";
import { launch, openWindow, settled } from "./browser.mjs";

const SIZES = {
  light: { width: 1280, height: 860, scheme: "light" },
  dark: { width: 1280, height: 860, scheme: "dark" },
  phone: { width: 390, height: 844, scheme: "light" },
  small: { width: 320, height: 568, scheme: "dark" },
};

const [url, folder, ...messages] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
const browser = await launch();
for (const [name, size] of Object.entries(SIZES)) {
  const { page, context } = await openWindow(browser, size);
  await page.setViewport({ ...size, deviceScaleFactor: 1.5 });
  await page.goto(url);
  await settled(page);
  await page.$eval("#temperature", (field) => (field.value = "0"));
  for (const message of messages) {
    await page.type("#prompt", message);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#stop").hidden, { timeout: 120_000 });
  }
  await page.$eval("#latest", (button) => button.click());
  await page.screenshot({ path: `${folder}/${name}.png` });
  await context.close();
}
await browser.close();
