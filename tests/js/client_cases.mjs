// OpenAI's client from npm against `outrider serve`; how it is run: cases.mjs.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { address, ask, expected, key, model, parameters, question, runCases } from "./cases.mjs";

const baseURL = `${address}/v1`;
const client = new OpenAI({ baseURL, apiKey: key, maxRetries: 0, timeout: 60_000 });

const alphabet = { model, messages: ask(question), temperature: 0, max_completion_tokens: 24 };
const Person = z.object({ name: z.string().max(16), trade: z.enum(["baker", "smith"]), age: z.number().int().min(18).max(99) });

export async function a_chat() {
  const answer = await client.chat.completions.create({ ...alphabet, logprobs: true, top_logprobs: 2 });
  const [choice] = answer.choices;
  assert.equal(choice.message.content, expected);
  assert.equal(choice.logprobs.content.map((one) => one.token).join(""), choice.message.content);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.equal(answer.outrider.generated_tokens, answer.usage.completion_tokens);
}

export async function a_stream_says_what_the_whole_answer_says() {
  const whole = await client.chat.completions.create(alphabet);
  const stream = await client.chat.completions.create({ ...alphabet, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let last;
  for await (last of stream) text += last.choices[0]?.delta.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(last.outrider.target_calls > 0);
}

export async function two_choices() {
  const { choices } = await client.chat.completions.create({ ...alphabet, n: 2, temperature: 1.5, seed: 4, max_completion_tokens: 8 });
  assert.deepEqual(choices.map(({ index }) => index), [0, 1]);
  assert.notEqual(choices[0].message.content, choices[1].message.content);
}

export async function structured_output_fits_the_schema() {
  const settings = { model, messages: ask("Describe one person as JSON."), temperature: 0 };
  const chat = await client.chat.completions.parse({ ...settings, max_completion_tokens: 64, response_format: zodResponseFormat(Person, "person") });
  Person.parse(chat.choices[0].message.parsed);
  const input = settings.messages;
  const response = await client.responses.parse({ model, input, temperature: 0, max_output_tokens: 64, text: { format: zodTextFormat(Person, "person") } });
  assert.deepEqual(response.output_parsed, chat.choices[0].message.parsed);
}

export async function a_predicted_output_changes_nothing() {
  const plain = await client.chat.completions.create({ ...alphabet, speculation: { policy: "plain" } });
  const content = plain.choices[0].message.content;
  const predicted = { ...alphabet, prediction: { type: "content", content }, speculation: { policy: "fixed", max_draft: 8 } };
  const answer = await client.chat.completions.create(predicted);
  assert.equal(answer.choices[0].message.content, content);
  assert.ok(answer.usage.completion_tokens_details.accepted_prediction_tokens > 12);
  assert.ok(answer.outrider.target_calls < plain.outrider.target_calls / 2);
}

export async function tools_are_run_and_their_results_answered() {
  const asked = [];
  const forecast = ({ city }) => (asked.push(city), `It is sunny in ${city}.`);
  const tool = { type: "function", function: { name: "forecast", description: "The weather of a city.", parameters, function: forecast, parse: JSON.parse } };
  const runner = client.chat.completions.runTools(
    { ...alphabet, messages: ask("How is the weather in Oslo?"), tools: [tool], tool_choice: "required", parallel_tool_calls: false, stream: true },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.ok(asked.length >= 1 && asked.every((city) => parameters.properties.city.enum.includes(city)), String(asked));
  const [result] = runner.messages.filter(({ role }) => role === "tool");
  assert.equal(result.content, `It is sunny in ${asked[0]}.`);
}

export async function a_response_and_its_events() {
  const whole = await client.chat.completions.create(alphabet);
  const events = [];
  const stream = await client.responses.create({ model, input: alphabet.messages, temperature: 0, max_output_tokens: 24, stream: true });
  for await (const event of stream) events.push(event);
  const text = events.filter(({ type }) => type === "response.output_text.delta").map(({ delta }) => delta).join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(events.at(-1).response.usage.output_tokens, whole.usage.completion_tokens);
}

export async function models_are_listed() {
  const names = [];
  for await (const { id } of client.models.list()) names.push(id);
  assert.ok(names.includes(model));
  await assert.rejects(client.models.retrieve("gpt-9"), OpenAI.NotFoundError);
}

export async function errors_are_of_the_clients_classes() {
  await assert.rejects(client.chat.completions.create({ ...alphabet, model: "gpt-9" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...alphabet, top_q: 1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.param, error.code], ["top_q", "unknown_field"]);
    return true;
  });
  const stranger = new OpenAI({ baseURL, apiKey: "a-key-that-nobody-was-given", maxRetries: 0 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
}

export async function a_stream_can_be_left() {
  const stream = await client.chat.completions.create({ ...alphabet, max_completion_tokens: 800, ignore_eos: true, stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
}

export async function who_waits_no_longer_gets_an_error() {
  const endless = { ...alphabet, max_completion_tokens: 800, ignore_eos: true };
  await assert.rejects(client.chat.completions.create(endless, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);
}

runCases(import.meta.url);
