// The clients from npm: `node drivers.mjs CLIENT ADDRESS MODEL`, with the functions, the lines of
// JSON and the forms of the Python drivers (../drivers/__init__.py and __main__.py, ../forms.py).
import readline from "node:readline";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [client, address, model] = process.argv.slice(2);
const [SHORT, STRUCTURED, LONG] = [64, 256, 1000];
const key = "any";

const Name = z.string().max(20);
const Colour = z.enum(["red", "green", "blue"]);
const Recursion = z.object({
  name: Name,
  get inner() {
    return Recursion.nullable();
  },
});
const forms = {
  records: z.object({ points: z.record(z.string(), z.int()) }),
  unions: z.object({
    shape: z.union([
      z.object({ kind: z.literal("circle"), radius: z.int() }),
      z.object({ kind: z.literal("square"), side: z.int() }),
    ]),
  }),
  optionals: z.object({ name: Name, nickname: Name.nullish() }),
  sets: z.object({ colours: z.set(Colour) }),
  decimals: z.object({ price: z.string().regex(/^\d{1,4}\.\d{2}$/) }),
  dates: z.object({ day: z.iso.date(), time: z.iso.datetime() }),
  enums: z.object({ colour: Colour, size: z.enum(["small", "large"]) }),
  recursion: Recursion,
};

const weather = z.object({ city: z.string() });
const getWeather = ({ city }) => `${city}: sunny, 21 degrees`;
const described = {
  name: "get_weather",
  description: "Tell the weather of a city.",
  parameters: z.toJSONSchema(weather),
};
const user = (content) => [{ role: "user", content }];

async function* texts(pieces, text) {
  for await (const piece of pieces) yield text(piece) ?? "";
}

// -- OpenAI's two protocols

const openai = new OpenAI({ baseURL: `${address}/v1`, apiKey: key, maxRetries: 0 });

const openaiChat = {
  request: (messages, max = SHORT) => ({
    model,
    messages,
    temperature: 0,
    max_completion_tokens: max,
  }),
  create(messages, more = {}) {
    return openai.chat.completions.create({ ...this.request(messages), ...more });
  },
  async ask(messages) {
    return (await this.create(messages)).choices[0].message.content;
  },
  async *stream(question, max) {
    const body = { ...this.request(user(question), max), stream: true };
    const chunks = await openai.chat.completions.create(body);
    yield* texts(chunks, (chunk) => chunk.choices[0]?.delta.content);
  },
  async tools(question) {
    const tools = [{ type: "function", function: described }];
    const asked = { tools, tool_choice: "required" };
    const { message } = (await this.create(user(question), asked)).choices[0];
    const calls = message.tool_calls.map((call) => ({
      name: call.function.name,
      arguments: JSON.parse(call.function.arguments),
    }));
    const results = message.tool_calls.map((call, index) => ({
      role: "tool",
      tool_call_id: call.id,
      content: getWeather(calls[index].arguments),
    }));
    const messages = [...user(question), message, ...results];
    const answer = await this.create(messages, { tools, tool_choice: "none" });
    return { calls, answer: answer.choices[0].message.content };
  },
  async structured(form, name, question) {
    const answer = await openai.chat.completions.parse({
      ...this.request(user(question), STRUCTURED),
      response_format: zodResponseFormat(form, name),
    });
    return answer.choices[0].message.parsed;
  },
  async embeddings(input) {
    return (await openai.embeddings.create({ model, input })).data.map((item) => item.embedding);
  },
};

const openaiResponses = {
  request: (input, max = SHORT) => ({ model, input, temperature: 0, max_output_tokens: max }),
  create(input, more = {}) {
    return openai.responses.create({ ...this.request(input), ...more });
  },
  async ask(messages) {
    return (await this.create(messages)).output_text;
  },
  async *stream(question, max) {
    const events = await openai.responses.create({ ...this.request(question, max), stream: true });
    yield* texts(events, (event) =>
      event.type === "response.output_text.delta" ? event.delta : undefined,
    );
  },
  async tools(question) {
    const tools = [{ type: "function", strict: false, ...described }];
    const made = await this.create(user(question), { tools, tool_choice: "required" });
    const found = made.output.filter((item) => item.type === "function_call");
    const calls = found.map((item) => ({ name: item.name, arguments: JSON.parse(item.arguments) }));
    const results = found.map((item, index) => ({
      type: "function_call_output",
      call_id: item.call_id,
      output: getWeather(calls[index].arguments),
    }));
    const input = [...user(question), ...made.output, ...results];
    return { calls, answer: (await this.create(input, { tools, tool_choice: "none" })).output_text };
  },
  async structured(form, name, question) {
    const answer = await openai.responses.parse({
      ...this.request(question, STRUCTURED),
      text: { format: zodTextFormat(form, name) },
    });
    return answer.output_parsed;
  },
  embeddings: openaiChat.embeddings,
};

// -- Anthropic's

const anthropic = new Anthropic({ baseURL: address, apiKey: key, maxRetries: 0 });
const joined = (message) =>
  message.content.map((block) => (block.type === "text" ? block.text : "")).join("");

const anthropicMessages = {
  request: (messages, max = SHORT) => ({ model, messages, temperature: 0, max_tokens: max }),
  create(messages, more = {}) {
    return anthropic.messages.create({ ...this.request(messages), ...more });
  },
  async ask(messages) {
    return joined(await this.create(messages));
  },
  async *stream(question, max) {
    const events = anthropic.messages.stream(this.request(user(question), max));
    yield* texts(events, (event) => event.delta?.text); // who breaks off aborts it
  },
  async tools(question) {
    const { parameters, ...named } = described;
    const tools = [{ ...named, input_schema: parameters }];
    const made = await this.create(user(question), { tools, tool_choice: { type: "any" } });
    const found = made.content.filter((block) => block.type === "tool_use");
    const results = found.map((block) => ({
      type: "tool_result",
      tool_use_id: block.id,
      content: getWeather(block.input),
    }));
    const messages = [
      ...user(question),
      { role: "assistant", content: made.content },
      ...user(results),
    ];
    const calls = found.map((block) => ({ name: block.name, arguments: block.input }));
    const answer = await this.create(messages, { tools, tool_choice: { type: "none" } });
    return { calls, answer: joined(answer) };
  },
  async structured(form, name, question) {
    const answer = await anthropic.messages.parse({
      ...this.request(user(question), STRUCTURED),
      output_config: { format: zodOutputFormat(form) },
    });
    return answer.parsed_output;
  },
};

// -- the AI SDK, with two of its providers

const sdk = (chosen, embedding) => ({
  request: (more, max = SHORT) => ({
    model: chosen,
    temperature: 0,
    maxOutputTokens: max,
    maxRetries: 0,
    ...more,
  }),
  async ask(messages) {
    return (await generateText(this.request({ messages }))).text;
  },
  async *stream(prompt, max) {
    const leaving = new AbortController();
    try {
      yield* streamText(this.request({ prompt, abortSignal: leaving.signal }, max)).textStream;
    } finally {
      leaving.abort();
    }
  },
  async tools(prompt) {
    const { steps, text } = await generateText(
      this.request({
        prompt,
        tools: {
          get_weather: tool({
            description: described.description,
            inputSchema: weather,
            execute: async (input) => getWeather(input),
          }),
        },
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
        stopWhen: stepCountIs(2),
      }),
    );
    const calls = steps[0].toolCalls.map((call) => ({
      name: call.toolName,
      arguments: call.input,
    }));
    return { calls, answer: text };
  },
  async structured(schema, name, prompt) {
    const output = Output.object({ schema, name });
    return (await generateText(this.request({ prompt, output }, STRUCTURED))).output;
  },
  ...(embedding && {
    async embeddings(values) {
      return (await embedMany({ model: embedding, values, maxRetries: 0 })).embeddings;
    },
  }),
});

// -- Ollama's

const ollama = new Ollama({ host: address });
// Ollama has no `tool_choice`; the model does what it did before.
const earlierCalls = ["London", "Rome"].flatMap((city) => [
  { role: "user", content: `What is the weather in ${city}?` },
  {
    role: "assistant",
    content: "",
    tool_calls: [{ function: { name: described.name, arguments: { city } } }],
  },
  { role: "tool", tool_name: described.name, content: getWeather({ city }) },
]);

const ollamaChat = {
  request: (messages, max = SHORT) => ({
    model,
    messages,
    options: { temperature: 0, num_predict: max },
  }),
  async ask(messages) {
    return (await ollama.chat(this.request(messages))).message.content;
  },
  async *stream(question, max) {
    const parts = await ollama.chat({ ...this.request(user(question), max), stream: true });
    let ended = false;
    try {
      yield* texts(parts, (part) => part.message.content);
      ended = true;
    } finally {
      if (!ended) parts.abort();
    }
  },
  async tools(question) {
    const tools = [{ type: "function", function: described }];
    const asked = [...earlierCalls, ...user(question)];
    const { message } = await ollama.chat({ ...this.request(asked), tools });
    const calls = (message.tool_calls ?? []).map((call) => call.function);
    const results = calls.map((call) => ({
      role: "tool",
      tool_name: call.name,
      content: getWeather(call.arguments),
    }));
    const messages = [...asked, message, ...results];
    return { calls, answer: (await ollama.chat(this.request(messages))).message.content };
  },
  async structured(form, name, question) {
    const body = { ...this.request(user(question), STRUCTURED), format: z.toJSONSchema(form) };
    return form.parse(JSON.parse((await ollama.chat(body)).message.content));
  },
  async embeddings(input) {
    return (await ollama.embed({ model, input })).embeddings;
  },
};

const compatible = createOpenAICompatible({
  name: "specops",
  baseURL: `${address}/v1`,
  apiKey: key,
  supportsStructuredOutputs: true,
});
const drivers = {
  openai_chat: openaiChat,
  openai_responses: openaiResponses,
  anthropic_messages: anthropicMessages,
  ai_openai_compatible: sdk(compatible(model), compatible.embeddingModel(model)),
  ai_anthropic: sdk(createAnthropic({ baseURL: `${address}/v1`, apiKey: key })(model)),
  ollama_chat: ollamaChat,
};

const driver = drivers[client];

// All pieces of an answer, or the first that says something: then the client leaves.
async function read(pieces, whole) {
  const found = [];
  for await (const piece of pieces) {
    found.push(piece);
    if (piece && !whole) break; // which closes the stream
  }
  return found;
}

async function tried(feature, form, argument) {
  switch (feature) {
    case "structured":
      return driver.structured(forms[form], form, argument);
    case "chat":
      return driver.ask(user(argument));
    case "too_long":
      return driver.ask(argument);
    case "stream":
      return read(driver.stream(argument, SHORT), true);
    case "cancel":
      return read(driver.stream(argument, LONG), false);
    default:
      return driver[feature](argument);
  }
}

async function attempt({ feature, form, argument }) {
  try {
    return { result: (await tried(feature, form, argument)) ?? null };
  } catch (error) {
    console.error(error);
    const names = [];
    for (let kind = error; kind && kind !== Object.prototype; kind = Object.getPrototypeOf(kind)) {
      names.push(kind.constructor.name);
    }
    return { error: { names: [...new Set([...names, error.name])], message: error.message } };
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await attempt(JSON.parse(line))));
}
