// The chat page: a conversation, its settings, and one reply at a time.
import { render } from "./markdown.js";
import { ask, models } from "./stream.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const question = $("question");
const form = $("settings").querySelector("form");

let model = "";
let messages = []; // as the server takes them
let running = null; // the AbortController of the reply that is being written

function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

function button(label, action) {
  const element = make("button", "", label);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

// ---- what stays when the page is loaded again: settings, and the conversation of this tab

function remember(store, name, value) {
  try {
    store.setItem(name, JSON.stringify(value));
  } catch {
    // Storage may be full or forbidden; the page works without.
  }
}

function recall(store, name, otherwise) {
  try {
    return JSON.parse(store.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function saveSettings() {
  const values = Object.fromEntries(new FormData(form));
  delete values.api_key; // a secret, for this tab only
  remember(localStorage, "lily.settings", { ...values, thinking: form.elements.thinking.checked });
  remember(sessionStorage, "lily.key", form.elements.api_key.value);
}

function loadSettings() {
  for (const [name, value] of Object.entries(recall(localStorage, "lily.settings", {}))) {
    const field = form.elements[name];
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }
  form.elements.api_key.value = recall(sessionStorage, "lily.key", "");
}

// The fields of a request that the settings give.
function options() {
  const values = new FormData(form);
  const found = { chat_template_kwargs: { enable_thinking: form.elements.thinking.checked } };
  for (const name of ["thinking_token_budget", "max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    if (values.get(name) !== "" && form.elements[name].validity.valid) found[name] = Number(values.get(name));
  }
  if (!form.elements.thinking.checked) delete found.thinking_token_budget;
  return found;
}

// ---- what is on the page

// Whether the reader looks at the end; someone who has scrolled up is left in peace.
const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

function add(element) {
  $("welcome").hidden = true;
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

// A reply on the page. update() shows what has come so far, at most once a frame.
class Reply {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.element = make("article", "assistant");
    this.element.setAttribute("aria-label", "Lily");
    this.thoughts = make("div", "reasoning");
    this.summary = make("summary", "", "Thinking …");
    this.details = make("details", "", this.summary, this.thoughts);
    this.details.hidden = true;
    this.body = make("div", "text");
    this.foot = make("div", "foot");
    this.element.append(this.details, this.body, this.foot);
    this.drawing = false;
  }

  take(delta) {
    this.reasoning += delta.reasoning_content ?? "";
    this.text += delta.content ?? "";
    this.update();
  }

  update() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  draw() {
    const follow = atEnd();
    this.details.hidden = !this.reasoning;
    if (this.thoughts.textContent !== this.reasoning) this.thoughts.textContent = this.reasoning;
    this.summary.textContent = this.text ? "Thoughts" : "Thinking …";
    this.body.replaceChildren(...render(this.text));
    if (follow) log.scrollTop = log.scrollHeight;
  }

  end(line, again) {
    this.draw();
    this.summary.textContent = "Thoughts";
    const copy = button("Copy", () => navigator.clipboard?.writeText(this.text));
    this.foot.replaceChildren(line, ...(navigator.clipboard && this.text ? [copy] : []), button("Again", again));
  }

  fail(text) {
    const box = make("p", "problem", text);
    box.setAttribute("role", "alert");
    this.element.insertBefore(box, this.foot);
  }
}

function show(message) {
  if (message.role === "user") {
    const element = make("article", "user", message.content);
    element.setAttribute("aria-label", "You");
    return add(element);
  }
  const reply = new Reply();
  reply.text = message.content;
  reply.reasoning = message.reasoning_content ?? "";
  reply.draw();
  reply.summary.textContent = "Thoughts";
  return add(reply.element);
}

function setStatus(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null)); // read out when it is complete, not word by word
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

// ---- a turn

function speed(counts, seconds) {
  const rate = counts.completion_tokens > 1 && seconds > 0 ? (counts.completion_tokens - 1) / seconds : 0;
  const cached = counts.prompt_tokens_details?.cached_tokens ?? 0;
  const prompt = `${counts.prompt_tokens} prompt tokens${cached ? ` (${cached} known)` : ""}`;
  return `${counts.completion_tokens} tokens${rate ? `, ${rate.toFixed(1)} tokens/s` : ""}, ${prompt}`;
}

function progress(note) {
  const [, done, total] = /prefill (\d+)\/(\d+)/.exec(note) ?? [];
  if (total) setStatus(`Reading the conversation: ${Math.floor((100 * done) / total)} %`);
}

// What to say of an error; fetch() throws a TypeError where there is no connection.
const reason = (error) => (error instanceof TypeError ? "the server cannot be reached" : error.message);

async function answer() {
  const reply = new Reply();
  const controller = new AbortController();
  setRunning(controller);
  setStatus("Waiting for the model …");
  add(reply.element);
  const system = form.elements.system.value.trim();
  const request = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...options(),
  };
  let first = 0;
  let last = 0;
  let counts = null;
  let line = "";
  try {
    await ask(request, form.elements.api_key.value, controller.signal, {
      take(delta, finish) {
        if (delta.content || delta.reasoning_content) {
          last = performance.now();
          first ||= last;
          setStatus(delta.content ? "Answering …" : "Thinking …");
        }
        reply.take(delta);
        if (finish === "length") line = "cut off, ";
      },
      note: progress,
      usage: (found) => (counts = found),
    });
    line += counts ? speed(counts, (last - first) / 1000) : "";
    setStatus("Done.");
  } catch (error) {
    if (controller.signal.reason === "forget") return; // there is another conversation now
    line = "stopped";
    if (controller.signal.aborted) setStatus("Stopped.");
    else {
      setStatus("Failed.");
      reply.fail(reason(error));
    }
  }
  setRunning(null);
  if (reply.text || reply.reasoning) {
    messages.push({ role: "assistant", content: reply.text, reasoning_content: reply.reasoning });
  }
  reply.end(line, again);
  remember(sessionStorage, "lily.messages", messages);
  for (const older of log.querySelectorAll(".assistant:not(:last-of-type) .foot button")) {
    if (older.textContent === "Again") older.remove(); // only the last reply can be had again
  }
  question.focus();
}

function send() {
  const text = question.value.trim();
  if (!text || running) return;
  if (messages.at(-1)?.role === "user") messages.pop(); // it was never answered
  messages.push({ role: "user", content: text });
  question.value = "";
  grow();
  show(messages.at(-1));
  answer();
}

function again() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  log.lastElementChild.remove();
  answer();
}

function begin() {
  running?.abort("forget");
  setRunning(null);
  messages = [];
  remember(sessionStorage, "lily.messages", messages);
  log.replaceChildren($("welcome"));
  $("welcome").hidden = false;
  setStatus("");
  question.focus();
}

// ---- wiring

async function findModel() {
  try {
    [model] = await models(form.elements.api_key.value);
    $("model").textContent = model;
    document.title = `Lily: ${model}`;
    setStatus("");
  } catch (error) {
    setStatus(reason(error));
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  // Enter that ends the input of a character is not one that sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", begin);
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => {
  saveSettings();
  findModel();
  question.focus();
});

loadSettings();
messages = recall(sessionStorage, "lily.messages", []);
messages.forEach(show);
findModel();
