"use strict";

/* The server's API as the page uses it, and its errors as sentences. Paths are relative: the page may be
   served under a prefix. */

const KEY_NAME = "outrider.key";
const NO_ANSWER = 0; // in place of an HTTP status
const KEY_NEEDED = "This server needs an API key. Whoever runs it has one for you.";
const KEY_REFUSED = "This server does not know that API key. Check it, or ask whoever runs the server.";

/** An error whose message is a sentence for people. `status` is HTTP's, or NO_ANSWER. */
class ServerError extends Error {
  constructor(sentence, status = NO_ANSWER) {
    super(sentence);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401;
  }
}

const apiKey = {
  get: () => sessionStorage.getItem(KEY_NAME) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY_NAME, key) : sessionStorage.removeItem(KEY_NAME)),
};

/** A model (null: the first) and what its calls cost: GET /outrider/status. Raises ServerError. */
async function fetchStatus(model) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const response = await request(`outrider/status${query}`, {});
  return response.json().catch(() => {
    throw new ServerError("The server described itself in a way that cannot be read.");
  });
}

/** The chunks of a streamed chat completion. Raises ServerError; AbortError when `signal` says so. */
async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isDone = false;
  for await (const data of readEvents(response.body)) {
    isDone = data === "[DONE]";
    if (isDone) break;
    const chunk = parsed(data);
    if (chunk.error) throw new ServerError(sentenceOf(chunk.error, "The server gave up on this answer."));
    yield chunk;
  }
  if (!isDone) throw new ServerError("The connection ended before the answer was complete.");
}

async function request(path, options) {
  const key = apiKey.get();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response, Boolean(key));
  return response;
}

async function refusal(response, hadKey) {
  const { status } = response;
  if (status === 401) return new ServerError(hadKey ? KEY_REFUSED : KEY_NEEDED, status); // its own words are for programs
  const said = await response.json().catch(() => null);
  const why = status === 429 ? "The server is busy." : `The server answered ${status} and did not say why.`;
  let sentence = sentenceOf(said?.error, why);
  const wait_s = Number(response.headers.get("Retry-After"));
  if (wait_s > 0) sentence += ` Try again in ${counted(wait_s, "second")}.`;
  return new ServerError(sentence, status);
}

function sentenceOf(error, otherwise) {
  const message = typeof error === "string" ? error : error?.message;
  if (typeof message !== "string" || !message.trim()) return otherwise;
  return /[.!?]$/.test(message.trim()) ? message.trim() : `${message.trim()}.`;
}

function parsed(data) {
  try {
    const chunk = JSON.parse(data);
    if (typeof chunk === "object" && chunk !== null) return chunk;
  } catch {
    // said below
  }
  throw new ServerError("The server sent something that cannot be read.");
}

/** The data of server-sent events in a stream of bytes, however these are cut. */
async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader);
      rest += decoder.decode(value, { stream: !done });
      // A carriage return at the end may be the first half of a line's end.
      const lines = rest.split(done ? /\r\n|\n|\r/ : /\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) break;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection broke before the answer was complete.");
  }
}
