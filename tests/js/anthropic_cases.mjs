// Anthropic's client from npm against `outrider serve`; how it is run: cases.mjs.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { address, ask, expected, key, model, parameters, question, runCases } from "./cases.mjs";

const client = new Anthropic({ baseURL: address, apiKey: key, maxRetries: 0, timeout: 60_000 });
const message = { model, max_tokens: 24, messages: ask(question), temperature: 0 };
const tool = { name: "forecast", description: "The weather of a city.", input_schema: parameters };

export async function a_message() {
  const answer = await client.messages.create(message);
  assert.deepEqual(answer.content.map(({ type, text }) => [type, text]), [["text", expected]]);
  assert.deepEqual([answer.role, answer.stop_reason, answer.usage.output_tokens], ["assistant", "max_tokens", 24]);
  const { input_tokens } = await client.messages.countTokens({ model, messages: message.messages });
  assert.equal(answer.usage.input_tokens + answer.usage.cache_read_input_tokens, input_tokens);
}

export async function a_stream_adds_up_to_it() {
  const stream = client.messages.stream(message);
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const last = await stream.finalMessage();
  assert.equal(text, expected);
  assert.equal(last.content[0].text, expected);
  assert.equal(last.usage.output_tokens, 24);
}

export async function a_tool_is_called_and_its_result_answered() {
  const asked = {
    ...message,
    messages: ask("How is the weather in Oslo?"),
    tools: [tool],
    tool_choice: { type: "any", disable_parallel_tool_use: true },
    max_tokens: 64,
  };
  const stream = client.messages.stream(asked);
  let json = "";
  stream.on("inputJson", (delta) => (json += delta));
  const { content, stop_reason } = await stream.finalMessage();
  assert.equal(stop_reason, "tool_use");
  const [call] = content.filter(({ type }) => type === "tool_use");
  assert.equal(call.name, "forecast");
  assert.deepEqual(JSON.parse(json), call.input);
  assert.ok(parameters.properties.city.enum.includes(call.input.city));
  const result = { type: "tool_result", tool_use_id: call.id, content: "It is sunny." };
  const messages = [...asked.messages, { role: "assistant", content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ ...asked, messages, tool_choice: { type: "none" }, max_tokens: 12 });
  assert.deepEqual(answer.content.map(({ type }) => type), ["text"]);
}

export async function a_message_fits_a_schema() {
  const output_config = { format: { type: "json_schema", schema: parameters } };
  const answer = await client.messages.create({ ...message, messages: ask("Name a city."), max_tokens: 48, output_config });
  assert.ok(parameters.properties.city.enum.includes(JSON.parse(answer.content[0].text).city));
}

export async function errors_are_of_the_clients_classes() {
  await assert.rejects(client.messages.create({ ...message, model: "gpt-9" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...message, top_q: 1 }), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.match(error.message, /unknown field: top_q/);
    return true;
  });
  const stranger = new Anthropic({ baseURL: address, apiKey: "a-key-that-nobody-was-given", maxRetries: 0 });
  await assert.rejects(stranger.messages.create(message), Anthropic.AuthenticationError);
}

export async function a_stream_can_be_left() {
  const stream = await client.messages.create({ ...message, max_tokens: 800, ignore_eos: true, stream: true });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  assert.ok(stream.controller.signal.aborted);
}

export async function who_waits_no_longer_gets_an_error() {
  const endless = { ...message, max_tokens: 800, ignore_eos: true };
  await assert.rejects(client.messages.create(endless, { timeout: 500 }), Anthropic.APIConnectionTimeoutError);
}

runCases(import.meta.url);
