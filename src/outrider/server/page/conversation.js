"use strict";

/* The conversation: turns in order, the one answer that is running, and what is sent to the server. It lives
   in this tab's memory alone. */

class Conversation {
  /** `settings` gives the fields of a request; `hooks` are told {began, frame, ended} of each answer. */
  constructor(container, settings, hooks) {
    this.container = container;
    this.settings = settings;
    this.hooks = hooks;
    this.model = "";
    this.turns = [];
    this.running = null; // {turn, controller}
  }

  /** Send a message. Raises SettingComplaint, and sends nothing then. */
  ask(text) {
    const fields = this.settings.request();
    const user = new UserTurn(text, { edit: (changed) => this.edit(user, changed) });
    this.add(user);
    this.answer(fields);
  }

  /** Put other words in a message's place; what followed it goes. */
  edit(user, text) {
    this.again(user, () => this.ask(text));
  }

  regenerate(turn) {
    this.again(turn, () => this.answer(this.settings.request()));
  }

  /** Go back to before `turn`, and on with `act`; everything stays where a setting is at fault. */
  again(turn, act) {
    try {
      this.settings.request();
    } catch (complaint) {
      this.hooks.complain(complaint);
      return;
    }
    this.stop();
    for (const gone of this.turns.splice(this.turns.indexOf(turn))) gone.node.remove();
    act();
  }

  /** Try the last answer once more if it failed for want of a key. */
  retryAfterKey() {
    const last = this.turns.at(-1);
    if (last?.reply?.needsKey) this.regenerate(last);
  }

  clear() {
    this.stop();
    this.running = null;
    this.turns = [];
    this.container.replaceChildren();
  }

  stop() {
    this.running?.controller.abort();
  }

  add(turn) {
    this.turns.push(turn);
    this.container.append(turn.node);
  }

  messages() {
    const messages = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    this.turns.forEach((turn, i) => {
      const answer = this.turns[i + 1]?.reply;
      if (turn.reply && turn.reply.content.text) {
        messages.push({ role: "assistant", content: turn.reply.content.text });
      }
      // A message that got no answer is not sent again: templates want the roles in turn.
      if (!turn.reply && !(answer && !answer.isRunning && !answer.content.text)) {
        messages.push({ role: "user", content: turn.text });
      }
    });
    return messages;
  }

  async answer(fields) {
    this.stop();
    const reply = new Reply({ literal: Boolean(fields.response_format) });
    const body = { model: this.model, messages: this.messages(), ...fields };
    const turn = new ReplyTurn(reply, { regenerate: () => this.regenerate(turn) });
    const controller = new AbortController();
    const running = { turn, controller };
    this.running = running;
    this.add(turn);
    this.hooks.began(reply);
    await this.receive(turn, body, controller.signal);
    reply.isRunning = false;
    turn.end();
    if (!reply.error && !reply.isStopped) this.settleBefore(turn);
    if (this.running === running) {
      this.running = null;
      this.hooks.ended(reply);
    }
  }

  settleBefore(turn) {
    for (const earlier of this.turns.slice(0, Math.max(this.turns.indexOf(turn), 0))) earlier.settle?.();
  }

  async receive({ reply }, body, signal) {
    const frames = new Frames(() => this.showFrame());
    try {
      for await (const chunk of streamChat(body, signal)) {
        reply.take(chunk);
        frames.ask();
      }
    } catch (error) {
      reply.isStopped = error.name === "AbortError";
      reply.needsKey = Boolean(error.needsKey);
      if (!reply.isStopped) reply.error = error.message;
    } finally {
      frames.cancel();
    }
  }

  showFrame() {
    if (!this.running) return;
    this.running.turn.update();
    this.hooks.frame(this.running.turn.reply);
  }
}

/** Work that is done once an animation frame, however often it is asked for. */
class Frames {
  constructor(work) {
    this.work = work;
    this.asked = 0;
  }

  ask() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.work();
    });
  }

  cancel() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
  }
}
