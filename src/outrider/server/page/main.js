"use strict";

/* Puts the page together: what happens when something is sent, answered, refused, or pressed. */

const SUGGESTIONS = [
  "Explain how tides work to a curious ten-year-old.",
  "Correct the spelling: The boat crosses the river in the mornning and comes back in the evenning.",
  "Write a Python function that parses a CSV line, then the same with type hints.",
];

const RETRY_MS = 2000;

const prompt = byId("prompt");
const settings = new Settings();
const legend = new Legend(byId("legend"));
const gauge = new Gauge();
const chart = new CostChart(byId("chart"));
const speech = new Speech(byId("spoken"));
const follower = new Follower(byId("talk"), byId("latest"));
const conversation = new Conversation(byId("turns"), settings, { began, frame, ended, complain });
let drafters = [];

function began(reply) {
  byId("welcome").hidden = true;
  complain(null);
  setBusy(true);
  gauge.clear();
  chart.mark(NaN, NaN);
  speech.say("Answering.");
  speech.follow(reply.content);
  follower.toEnd();
}

function frame(reply) {
  gauge.show(reply);
  legend.show(drafters, reply.content.lengths);
  follower.follow();
}

function ended(reply) {
  setBusy(false);
  gauge.show(reply, { now: true });
  legend.show(drafters, reply.content.lengths);
  chart.mark(reply.checkedPerCall, reply.perCall);
  byId("account").replaceChildren(accountOf(reply));
  const how = reply.isStopped ? "Stopped." : "The answer is complete.";
  speech.end(reply.error ? "" : `${how} ${summaryOf(reply)}`); // an error speaks for itself
  follower.follow();
  if (reply.needsKey) askForKey(reply.error);
  else if (!reply.error) byId("key-form").hidden = true;
  if (!reply.needsKey) refreshCosts(reply);
}

/** What calls cost is measured on: show it as it is now. Without an answer the last known costs stay. */
async function refreshCosts(reply) {
  const status = await fetchStatus(conversation.model).catch(() => null);
  if (!status || conversation.turns.at(-1)?.reply !== reply) return;
  showStatus(status);
  chart.mark(reply.checkedPerCall, reply.perCall);
}

function showCosts({ plain_token_s, calls_s }) {
  gauge.setPlain(plain_token_s);
  chart.show(calls_s ?? []);
}

function setBusy(isBusy) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (hadFocus) prompt.focus();
}

/** Say what is wrong with a setting beside the message, and go to the setting; null: all is well. */
function complain(complaint) {
  byId("complaint").hidden = !complaint;
  byId("complaint").textContent = complaint?.message ?? "";
  if (!complaint) return;
  if (!(complaint instanceof SettingComplaint)) throw complaint;
  showPanel(true);
  byId("settings").open = true;
  complaint.input.focus();
}

/** A complaint about a setting goes when that is put right. */
function recheck() {
  if (byId("complaint").hidden) return;
  try {
    settings.request();
    complain(null);
  } catch (complaint) {
    byId("complaint").textContent = complaint.message;
  }
}

function send(event) {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || conversation.running) return;
  try {
    conversation.ask(text);
  } catch (complaint) {
    complain(complaint);
    return;
  }
  prompt.value = "";
  growPrompt();
  showPanel(false);
}

/** The message box is as high as what is in it. */
function growPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function askForKey(sentence) {
  byId("key-form").hidden = false;
  byId("key-label").textContent = sentence;
  byId("key").focus();
}

function showKeyState() {
  byId("key-state").hidden = !apiKey.get();
}

async function useKey(event) {
  event.preventDefault();
  apiKey.set(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  showKeyState();
  prompt.focus();
  await loadStatus();
  if (byId("key-form").hidden) conversation.retryAfterKey();
}

/** Ask the server for its models and costs, and show them. */
async function loadStatus() {
  let status;
  try {
    status = await fetchStatus(conversation.model);
  } catch (error) {
    byId("models").textContent = error.message;
    if (error.needsKey) askForKey(error.message);
    if ([NO_ANSWER, 503].includes(error.status)) setTimeout(loadStatus, RETRY_MS); // it starts, or comes back
    return;
  }
  showStatus(status);
  legend.show(drafters);
}

function showStatus(status) {
  const { model, draft, drafters: known = [], models = [model], is_loaded: isLoaded = true } = status;
  conversation.model = model;
  drafters = known;
  const drafting = draft ? ` with draft ${draft}` : " without a draft model";
  const isChoosing = document.activeElement?.id === "model";
  byId("models").replaceChildren(
    models.length > 1 ? modelPicker(models, model) : element("strong", {}, model),
    isLoaded ? drafting : " is loaded by the first message",
  );
  if (isChoosing) byId("model")?.focus();
  document.title = `${model} · Outrider`;
  showCosts(status);
  settings.offer(status);
}

/** The models that are served; the next message goes to the one that is chosen. */
function modelPicker(models, current) {
  const options = models.map((name) => element("option", { value: name, selected: name === current }, name));
  const picker = element("select", { id: "model", "aria-label": "Model" }, ...options);
  picker.addEventListener("change", () => {
    conversation.model = picker.value;
    loadStatus();
  });
  return picker;
}

function startAnew() {
  conversation.clear();
  speech.end("New conversation.");
  setBusy(false);
  byId("welcome").hidden = false;
  gauge.clear();
  legend.show(drafters);
  chart.mark(NaN, NaN);
  complain(null);
  prompt.focus();
}

for (const text of SUGGESTIONS) {
  const take = () => {
    prompt.value = text;
    growPrompt();
    prompt.focus();
  };
  byId("starts").append(element("li", {}, button(text, take)));
}
byId("composer").addEventListener("submit", send);
byId("settings-form").addEventListener("input", recheck);
byId("key-form").addEventListener("submit", useKey);
byId("new").addEventListener("click", startAnew);
byId("stop").addEventListener("click", () => conversation.stop());
byId("forget-key").addEventListener("click", () => {
  apiKey.set("");
  showKeyState();
});
prompt.addEventListener("input", growPrompt);
prompt.addEventListener("keydown", (event) => {
  if (isSendKey(event)) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (conversation.running) conversation.stop();
  else closePanel();
});
setUpTheme();
setUpColours();
setUpPanel();
showKeyState();
loadStatus();
prompt.focus();
