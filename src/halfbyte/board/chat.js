// The page Chat: sends a message to each model of the page, and shows their answers as they are sampled.
const conversations = new WeakMap(); // messages by the column of a model

function turn(column, role, text) {
  const element = document.createElement("p");
  element.className = role;
  element.textContent = text;
  const turns = column.querySelector(".turns");
  turns.append(element);
  turns.scrollTop = turns.scrollHeight;
  return element;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function answer(column, message, numbers) {
  const messages = conversations.get(column) || [];
  messages.push({ role: "user", content: message });
  conversations.set(column, messages);
  turn(column, "user", message);
  const shown = turn(column, "assistant", "…");
  const begin = performance.now();
  let text = "";
  let usage = null;
  try {
    const response = await fetch("/api/chat", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...numbers, model: column.dataset.model, messages: JSON.stringify(messages) }),
    });
    if (!response.ok) throw new Error((await response.json()).message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      text += event.choices?.[0]?.delta?.content || "";
      usage = event.usage || usage;
      shown.textContent = text || "…";
    }
    shown.textContent = text;
    messages.push({ role: "assistant", content: text });
    const seconds = (performance.now() - begin) / 1000;
    const count = usage ? `${usage.completion_tokens} tokens, ${(usage.completion_tokens / seconds).toFixed(1)} tok/s` : "";
    turn(column, "note", count);
  } catch (error) {
    messages.pop();
    shown.className = "bad";
    shown.textContent = error.message;
  }
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!("chat" in form.dataset)) return;
  event.preventDefault();
  const { message, ...numbers } = Object.fromEntries(new FormData(form));
  const send = form.querySelector("button");
  send.disabled = true;
  form.elements.message.value = "";
  await Promise.all([...document.querySelectorAll("[data-model]")].map((column) => answer(column, message, numbers)));
  send.disabled = false;
});

document.addEventListener("reset", (event) => {
  if (!("chat" in event.target.dataset)) return;
  for (const column of document.querySelectorAll("[data-model]")) {
    conversations.delete(column);
    column.querySelector(".turns").replaceChildren();
  }
});

document.addEventListener("keydown", (event) => {
  const form = event.target.form;
  if (form && "chat" in form.dataset && event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
