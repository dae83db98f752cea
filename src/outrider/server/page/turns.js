"use strict";

/* How a conversation's turns look: what the user wrote, and the answers. */

const ENDINGS = {
  length: "It ended at the token limit.",
  context: "It ended because the context is full.",
  cancelled: "The server ended it early.",
};

/** What the user wrote; `actions` are {edit(text)}. */
class UserTurn {
  constructor(text, actions) {
    this.text = text;
    this.actions = actions;
    this.node = element("article", { class: "turn user" });
    this.showText();
  }

  showText() {
    this.node.replaceChildren(
      element("h2", { class: "who" }, "You"),
      element("p", { class: "said" }, this.text),
      element(
        "div",
        { class: "actions" },
        copyButton(() => this.text),
        button("Edit", () => this.showEditor()),
      ),
    );
  }

  showEditor() {
    const box = element("textarea", { "aria-label": "Edit your message", rows: 3 });
    box.value = this.text;
    const close = () => {
      this.showText();
      this.node.querySelector(".actions button:last-child").focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (box.value.trim()) this.actions.edit(box.value);
    };
    const form = element(
      "form",
      { class: "editor" },
      box,
      element("p", { class: "note" }, "What follows this message is replaced."),
      element(
        "div",
        { class: "line" },
        element("button", { class: "primary" }, "Send"),
        button("Cancel", close),
      ),
    );
    form.addEventListener("submit", send);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (isSendKey(event)) send(event);
    });
    this.node.replaceChildren(element("h2", { class: "who" }, "You"), form);
    box.focus();
  }
}

/** Enter without Shift, outside an input method's own use of it. */
function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** An answer; `actions` are {regenerate()}. `update` shows what has come since. */
class ReplyTurn {
  constructor(reply, actions) {
    this.reply = reply;
    this.thoughts = new Foldable("Reasoning");
    this.content = element("div", { class: "content" });
    this.view = new TextView(this.content, reply.content, { literal: reply.literal });
    this.tools = element("div");
    this.calls = [];
    this.error = element("p", { class: "complaint", role: "alert", hidden: true });
    this.footer = element("p", { class: "summary" }, "Waiting for the first token…");
    this.actions = element(
      "div",
      { class: "actions", hidden: true },
      copyButton(() => reply.content.text),
      button("Regenerate", () => actions.regenerate()),
    );
    this.node = element(
      "article",
      { class: "turn reply running", "aria-busy": "true" },
      element("h2", { class: "who" }, "Answer"),
      this.thoughts.node,
      this.content,
      this.tools,
      this.error,
      this.footer,
      this.actions,
    );
  }

  update() {
    const { reply } = this;
    this.view.update(reply.isRunning);
    this.thoughts.show(reply.reasoning);
    reply.tools.forEach((call, i) => this.showCall(call, i));
    if (!reply.isEmpty && reply.isRunning) this.footer.textContent = "";
  }

  showCall({ name, text }, place) {
    this.calls[place] ??= new Foldable("", this.tools);
    this.calls[place].show(laidOut(text), `Tool call: ${name}`);
  }

  /** Show how it ended. */
  end() {
    const { reply } = this;
    this.update();
    this.node.classList.remove("running");
    this.node.removeAttribute("aria-busy");
    this.error.hidden = !reply.error;
    this.error.textContent = reply.error ?? "";
    const how = reply.isStopped ? "Stopped." : (ENDINGS[reply.finish] ?? "");
    this.footer.textContent = [how, summaryOf(reply)].filter(Boolean).join(" ");
    this.footer.hidden = !this.footer.textContent;
    this.actions.hidden = false;
    this.actions.firstElementChild.hidden = !reply.content.text;
    this.actions.lastElementChild.textContent = reply.error ? "Try again" : "Regenerate";
  }

  /** A later answer has come: what went wrong here is over, and stays as a note. */
  settle() {
    if (this.error.hidden) return;
    this.error.hidden = true;
    this.footer.textContent = `It did not come to its end: ${this.reply.error}`;
    this.footer.hidden = false;
  }
}

/** Text behind a summary that opens it; not there before there is text. */
class Foldable {
  constructor(title, container = null) {
    this.title = element("summary", {}, title);
    this.text = document.createTextNode("");
    const scroller = { tabindex: 0, role: "region", "aria-label": title || "Tool call" };
    const shown = element("pre", scroller, this.text);
    this.node = element("details", { class: "fold", hidden: true }, this.title, shown);
    container?.append(this.node);
  }

  show(text, title = null) {
    if (title !== null && this.title.textContent !== title) this.title.textContent = title;
    if (text.length > this.text.length) this.text.appendData(text.slice(this.text.length));
    this.node.hidden = !text && title === null;
  }
}
