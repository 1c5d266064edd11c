// Pages work without this script. It sends buttons as JSON, and fetches a page again when its files have changed.
"use strict";

const INTERVAL = 1000; // milliseconds between looks at a live page
const message = document.getElementById("message");
let etag = "";
let failures = 0;

function show(text, isError) {
  message.textContent = text;
  message.className = isError ? "bad" : "good";
}

async function send(form, submitter) {
  const values = {};
  for (const [name, value] of new FormData(form)) values[name] = value;
  const button = submitter || form.querySelector("button");
  button.disabled = true;
  try {
    const response = await fetch(button.dataset.post || form.dataset.post, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(values),
    });
    const answer = response.headers.get("content-type")?.includes("json")
      ? await response.json()
      : { message: await response.text() };
    show(answer.message || "Done.", !response.ok);
    if (response.ok && answer.location) location.assign(answer.location);
    else if (response.ok) etag = "";
  } catch (error) {
    show(`The board does not answer: ${error.message}`, true);
  } finally {
    button.disabled = false;
  }
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.dataset.post) return;
  event.preventDefault();
  if (!form.dataset.confirm || window.confirm(form.dataset.confirm)) send(form, event.submitter);
});

// A page that is being used is not replaced: text in a field, chosen runs, a selection.
function isInUse(main) {
  const active = document.activeElement;
  return (
    (active && main.contains(active) && /^(INPUT|TEXTAREA|SELECT)$/.test(active.tagName)) ||
    main.querySelector("td input:checked") !== null ||
    main.querySelector("details.actions[open]") !== null ||
    String(window.getSelection()) !== ""
  );
}

async function refresh() {
  const main = document.querySelector("main[data-live]");
  if (!main) return;
  if (!document.hidden && !isInUse(main)) {
    try {
      const headers = etag ? { "if-none-match": etag } : {};
      const response = await fetch(location.href, { headers, cache: "no-store" });
      failures = 0;
      if (response.status === 200) {
        etag = response.headers.get("etag") || "";
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        const fresh = page.querySelector("main");
        if (fresh && !isInUse(main) && fresh.innerHTML !== main.innerHTML) {
          const open = [...main.querySelectorAll("details")].map((details) => details.open);
          main.replaceChildren(...fresh.childNodes);
          main.querySelectorAll("details").forEach((details, at) => (details.open = open[at] || false));
        }
      }
    } catch (error) {
      failures += 1;
      if (failures === 5) show("The board does not answer. This page shows the last numbers.", true);
    }
  }
  setTimeout(refresh, INTERVAL);
}

setTimeout(refresh, INTERVAL);
