"use strict";

/* What a screen reader says: an answer in whole sentences, at most every few seconds, and how it ended. */

const PAUSE_MS = 3000;
const KEPT = 4; // paragraphs in the live region

class Speech {
  constructor(region) {
    this.region = region;
    this.timer = null;
  }

  say(text) {
    const words = text.replace(/[*`#|]+/g, "").trim();
    if (!words) return;
    this.region.append(element("p", {}, words));
    while (this.region.childElementCount > KEPT) this.region.firstElementChild.remove();
  }

  /** Read a SourcedText while it grows. */
  follow(text) {
    clearInterval(this.timer);
    let said = 0;
    this.next = (isLast) => {
      const rest = text.text.slice(said);
      const end = isLast ? rest.length : rest.search(/(?:[.!?:;]\s|\n)(?!.*(?:[.!?:;]\s|\n))/s) + 1;
      this.say(rest.slice(0, end));
      said += end;
    };
    this.timer = setInterval(() => this.next(false), PAUSE_MS);
  }

  /** Read what is left, and how it ended. */
  end(summary) {
    clearInterval(this.timer);
    this.next?.(true);
    this.next = null;
    this.say(summary);
  }
}
