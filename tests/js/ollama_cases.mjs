// Ollama's client from npm against `outrider serve`; how it is run: cases.mjs.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { address, ask, expected, key, model, parameters, question, runCases } from "./cases.mjs";

const headers = { Authorization: `Bearer ${key}` };
const client = new Ollama({ host: address, headers });
const options = { temperature: 0, num_predict: 24 };
const chat = { model, messages: ask(question), options };
const tool = { type: "function", function: { name: "forecast", description: "The weather of a city.", parameters } };

async function joined(stream, of) {
  let text = "";
  let last;
  for await (last of stream) text += of(last);
  return [text, last];
}

export async function a_chat_and_a_text() {
  const answer = await client.chat(chat);
  assert.equal(answer.message.content, expected);
  assert.deepEqual([answer.done, answer.done_reason, answer.eval_count], [true, "length", 24]);
  const text = await client.generate({ model, prompt: question, options });
  assert.equal(text.response, expected);
}

export async function streams_add_up_to_it() {
  const [text, last] = await joined(await client.chat({ ...chat, stream: true }), ({ message }) => message.content);
  assert.deepEqual([text, last.done, last.eval_count], [expected, true, 24]);
  const [other] = await joined(await client.generate({ model, prompt: question, options, stream: true }), ({ response }) => response);
  assert.equal(other, expected);
}

export async function answers_fit_a_schema() {
  const asked = { ...chat, messages: ask("Name a city as JSON."), format: parameters, options: { ...options, num_predict: 48 } };
  const { message } = await client.chat(asked);
  assert.ok(parameters.properties.city.enum.includes(JSON.parse(message.content).city));
  const [text] = await joined(await client.chat({ ...asked, stream: true }), (part) => part.message.content);
  assert.equal(text, message.content);
}

export async function tools_and_their_results_are_read() {
  const plain = await client.chat(chat);
  const whole = await client.chat({ ...chat, tools: [tool] });
  assert.ok(whole.prompt_eval_count > plain.prompt_eval_count + 30);
  const turns = [
    ...ask("How is the weather in Oslo?"),
    { role: "assistant", content: "", tool_calls: [{ function: { name: "forecast", arguments: { city: "Oslo" } } }] },
    { role: "tool", tool_name: "forecast", content: "It is sunny." },
  ];
  const answer = await client.chat({ ...chat, messages: turns, tools: [tool] });
  assert.ok(answer.done && answer.prompt_eval_count > whole.prompt_eval_count);
}

export async function models_are_listed_and_shown() {
  const { models } = await client.list();
  assert.ok(models.some(({ name }) => name === model));
  assert.ok((await client.show({ model })).capabilities.includes("completion"));
}

export async function errors_have_the_status() {
  const is = (status, pattern) => (error) => {
    assert.equal(error.status_code, status, error.stack);
    assert.match(error.message, pattern);
    return true;
  };
  await assert.rejects(client.chat({ ...chat, model: "gpt-9" }), is(404, /gpt-9/));
  await assert.rejects(client.chat({ ...chat, model: "gpt-9", stream: true }), is(404, /gpt-9/));
  await assert.rejects(client.chat({ ...chat, options: { temperature: -1 } }), is(400, /options.temperature/));
  await assert.rejects(client.embed({ model, input: "hi" }), is(404, /api\/embed/));
  const stranger = new Ollama({ host: address, headers: { Authorization: "Bearer wrong" } });
  await assert.rejects(stranger.list(), is(401, /not accepted/));
}

export async function a_stream_can_be_left() {
  const long = { temperature: 1.5, seed: 5, num_predict: 800 };
  const stream = await client.chat({ ...chat, messages: ask("Tell a very long story."), options: long, stream: true });
  await assert.rejects(async () => {
    for await (const part of stream) if (part.message.content) stream.abort();
  }, { name: "AbortError" });
}

runCases(import.meta.url);
