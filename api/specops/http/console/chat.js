// -- chat ----------------------------------------------------------------------------------------
// A conversation in OpenAI's protocol: texts, thoughts and calls, with the origin of each token.

const turns = []; // the messages: {role, content, ...}, and `shown`, the element on the page
const KEPT = "specops.conversation"; // in the browser's storage, over a reload
let edited = null; // the element of the message that the next one replaces, with all that follow it

// The JSON in a field, or null where it is empty.
function jsonField(name) {
  const text = $(name).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${$(name).labels[0].firstChild.textContent.trim()}: ${error.message}`);
  }
}

function chatBody() {
  const system = $("system").value.trim();
  const messages = turns.map(({ shown, blocks, note, ...message }) => message);
  if (system) messages.unshift({ role: "system", content: system });
  const fields = { model: shown, messages, stream: true, return_tokens: true, ...options("max_tokens") };
  const schema = jsonField("schema");
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = jsonField("tools");
  if (tools) fields.tools = tools;
  return fields;
}

// An answer under way: its blocks of text, and the origin of each character.
class Answer {
  constructor(view, blocks = []) {
    this.view = view;
    this.raw = ""; // all tokens' text
    this.origins = []; // of each character of it
    this.made = {}; // tokens by origin
    this.blocks = blocks; // {kind, text, origins, name, id}
    this.cursor = 0; // the end of the part of `raw` that is in blocks
  }

  take({ delta, tokens }) {
    for (const token of tokens ?? []) {
      this.made[token.origin] = (this.made[token.origin] || 0) + 1;
      this.raw += token.text;
      for (let i = 0; i < token.text.length; i += 1) this.origins.push(token.origin);
    }
    if (delta.reasoning_content) this.add("reasoning", delta.reasoning_content);
    if (delta.content) this.add("text", delta.content);
    for (const call of delta.tool_calls ?? []) {
      if (call.id) this.blocks.push({ kind: "call", text: "", origins: [], name: call.function.name, id: call.id });
      this.add("call", call.function.arguments);
    }
  }

  add(kind, text) {
    let block = this.blocks.at(-1);
    if (block?.kind !== kind) this.blocks.push((block = { kind, text: "", origins: [] }));
    const at = this.raw.indexOf(text, this.cursor);
    for (let i = 0; i < text.length; i += 1) {
      block.origins.push(at < 0 ? "target" : this.origins[at + i]);
    }
    if (at >= 0) this.cursor = at + text.length;
    block.text += text;
  }

  // Nodes for a piece of a block's text: one span for each run of one origin.
  mark(block, from, to) {
    const nodes = [];
    for (let at = from; at < to; ) {
      const origin = block.origins[at];
      let end = at + 1;
      while (end < to && block.origins[end] === origin) end += 1;
      nodes.push(stretch(block.text.slice(at, end), origin));
      at = end;
    }
    return nodes;
  }

  show() {
    const atEnd = nearEnd();
    const shownBlocks = this.blocks.map((block) => {
      const mark = (from, to) => this.mark(block, from, to);
      if (block.kind === "text") return element("div", "", ...markdown(block.text, mark));
      const all = mark(0, block.text.length);
      if (block.kind === "call") {
        return element("div", "call", element("p", "heading", `calls ${block.name}`), element("pre", "code", ...all));
      }
      const details = element("details", "thoughts", element("summary", "", "thoughts"), element("p", "", ...all));
      details.open = this.view.querySelector("details")?.open ?? true;
      return details;
    });
    this.view.replaceChildren(...shownBlocks);
    if (atEnd) $("turns").scrollTop = $("turns").scrollHeight;
    showLegend(this.made, "chat-legend");
  }

  message() {
    const said = (kind) => this.blocks.filter((block) => block.kind === kind);
    const content = said("text").map((block) => block.text).join("\n\n");
    const message = { role: "assistant", content };
    const calls = said("call");
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, text }) => ({
        id,
        type: "function",
        function: { name, arguments: text || "{}" },
      }));
    }
    return message;
  }
}

function nearEnd() {
  const log = $("turns");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

// The text of a turn, without thoughts and calls.
function said(item) {
  return turns.find((turn) => turn.shown === item)?.content ?? "";
}

function smallButton(text, act) {
  const button = element("button", "small", text);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}

const WHO = { user: "You", assistant: "Model", tool: "Result" };

// Adds a turn to the page; returns where its content goes.
function showTurn(role) {
  const content = element("div", "content");
  const copy = smallButton("Copy", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(said(item));
    else getSelection().selectAllChildren(content); // the clipboard exists on secure pages only
    copy.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const edit = role === "user" ? [smallButton("Edit", () => change(item))] : [];
  const head = element("div", "who", element("h3", "", WHO[role]), ...edit, copy);
  const item = element("li", role, head, content);
  $("turns").append(item);
  $("turns").scrollTop = $("turns").scrollHeight;
  return { item, content };
}

function addTurn(message) {
  const { item, content } = showTurn(message.role);
  if (message.blocks) {
    const view = element("div", "");
    content.append(view, element("p", "hint", message.note));
    const plain = (block) => ({ ...block, origins: Array(block.text.length).fill("target") });
    new Answer(view, message.blocks.map(plain)).show();
  } else {
    content.append(element("p", "said", message.content));
  }
  turns.push({ ...message, shown: item });
}

function keep() {
  const messages = turns.map(({ shown, ...message }) => message);
  try {
    localStorage.setItem(KEPT, JSON.stringify({ system: $("system").value, messages }));
  } catch (error) {
    showError(`A reload will lose this conversation: ${error.message}`);
  }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT));
    $("system").value = kept?.system ?? "";
    kept?.messages.forEach(addTurn);
  } catch (error) {
    showError(`The conversation that the browser kept cannot be read: ${error.message}`);
  }
}

// Takes a message back into its field, to be changed and sent again; the same again: leaves it.
function change(item) {
  if (running) return;
  edited = item === edited ? null : item;
  $("message").value = said(edited);
  let faint = false;
  for (const { shown } of turns) shown.classList.toggle("faint", (faint ||= shown === edited));
  askFor();
  if (edited) $("message").focus();
}

// Removes all turns from a place on.
function cut(place) {
  for (const turn of turns.splice(place)) turn.shown.remove();
  edited = null;
}

function showChatFigures({ timings }, seconds) {
  const parts = [
    `${timings.predicted_n} tokens`,
    `${timings.predicted_per_second.toFixed(1)} per second`,
    `${timings.tokens_per_step.toFixed(2)} tokens per pass`,
    `${timings.draft_n_accepted} of ${timings.draft_n} draft tokens accepted`,
    `${seconds.toFixed(1)} s`,
  ];
  return parts.join(" · ");
}

async function answer() {
  if (running) return;
  const start = performance.now();
  showError("");
  let fields;
  try {
    fields = chatBody();
  } catch (error) {
    showError(error.message);
    return;
  }
  const { item, content } = showTurn("assistant");
  const view = element("div", "");
  const note = element("p", "hint");
  content.append(view, note);
  const given = new Answer(view);
  let last = null;
  let reason = null;
  busy(true);
  $("progress").textContent = "Generating.";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(fields),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      given.take(choice);
      given.show();
      reason = choice.finish_reason ?? reason;
      if (event.timings) last = event;
    }
    if (!last) throw new Error("the answer broke off");
    note.textContent = showChatFigures(last, (performance.now() - start) / 1000);
    if (reason === "length") note.textContent += " · cut off: it reached the longest answer";
    $("progress").textContent = `Done: ${last.timings.predicted_n} tokens.`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    note.textContent = stopped ? "stopped" : "failed";
    $("progress").textContent = stopped ? "Stopped." : "Failed.";
    if (!stopped) showError(error.message);
  } finally {
    busy(false);
  }
  if (nearEnd()) $("turns").scrollTop = $("turns").scrollHeight; // to the note
  if (!given.blocks.length || !item.isConnected) {
    item.remove();
    return;
  }
  const message = given.message();
  if (!last) delete message.tool_calls; // their arguments may be cut off
  const blocks = given.blocks.map(({ origins, ...block }) => block);
  turns.push({ ...message, blocks, note: note.textContent, shown: item });
  askFor();
}

// The calls of the last answer that still need a result.
function calls() {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  return (turns[last]?.tool_calls ?? []).slice(turns.length - 1 - last);
}

// Labels the input field: it is for a message, an earlier one, or the result of a call. Keeps the turns.
function askFor() {
  const [call] = calls();
  const label = call ? `Result of ${call.function.name}` : "Message";
  $("message-label").textContent = edited ? "Edited message, for the faint ones above" : label;
  $("regenerate").disabled = !turns.length;
  keep();
}

function sendMessage() {
  const content = $("message").value;
  if (running || !content.trim()) return;
  if (edited) cut(turns.findIndex(({ shown }) => shown === edited));
  $("message").value = "";
  const [call] = calls();
  addTurn(call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content });
  askFor();
  if (!calls().length) answer();
}

// Removes the last answer, if there is one, and asks for another.
function regenerate() {
  if (running) return;
  if (edited) change(edited);
  cut(turns.findLastIndex((turn) => turn.role !== "assistant") + 1);
  askFor();
  if (turns.length) answer();
}

function forget() {
  running?.abort();
  if (edited) change(edited);
  cut(0);
  $("turns").replaceChildren(); // an answer under way, too
  $("chat-legend").replaceChildren();
  showError("");
  askFor();
  $("message").focus();
}

// -- tabs ----------------------------------------------------------------------------------------

const TABS = ["chat", "completion"];

function showTab(name) {
  for (const tab of TABS) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    $(`panel-${tab}`).hidden = tab !== name;
  }
  $("skip").href = name === "chat" ? "#message" : "#prompt";
  $("skip").textContent = name === "chat" ? "Skip to the message" : "Skip to the prompt";
  $("chat-options").hidden = name !== "chat";
  $("completion-answer").hidden = name === "chat";
}

for (const [place, tab] of TABS.entries()) {
  $(`tab-${tab}`).addEventListener("click", () => showTab(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = TABS[1 - place];
    showTab(other);
    $(`tab-${other}`).focus();
  });
}
$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  sendMessage();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendMessage();
});
$("regenerate").addEventListener("click", regenerate);
$("forget").addEventListener("click", forget);
$("system").addEventListener("change", askFor);
restore();
askFor();
makeCharts();
follow();
