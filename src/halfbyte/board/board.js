// Pages work without this script. It sends buttons as JSON, and fetches a page again when the server says that its
// files have changed.
import "./chat.js";
import { follow, onZoom } from "./curves.js";

const PAUSE = 1000; // milliseconds between two fetches, at least; twice as long as a fetch takes on slow pages
const RETRY = 5000; // milliseconds until a refused stream is opened again
const message = document.getElementById("message");
let stream = null;
let failures = 0;
let timer = 0;
let fetched = 0; // when the last fetch began
let duration = 0; // of the last fetch

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
    else if (response.ok) schedule();
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

// A page that is being used is not replaced: a field with the focus, opened actions, selected text.
function isInUse(main) {
  const active = document.activeElement;
  return (
    (main.contains(active) && /^(INPUT|TEXTAREA|SELECT)$/.test(active.tagName) && active.type !== "checkbox") ||
    main.querySelector("details.actions[open]") !== null ||
    String(window.getSelection()) !== ""
  );
}

function replace(main, fresh) {
  const open = [...main.querySelectorAll("details")].map((details) => details.open);
  const chosen = new Set([...main.querySelectorAll("td input:checked")].map((input) => input.value));
  const focused = main.contains(document.activeElement) ? document.activeElement.value : undefined;
  const chart = [...main.querySelectorAll("svg.chart")].indexOf(document.activeElement);
  main.replaceChildren(...fresh.childNodes);
  main.querySelectorAll("details").forEach((details, index) => (details.open = open[index] || false));
  for (const input of main.querySelectorAll("td input")) {
    input.checked = chosen.has(input.value);
    if (input.value === focused) input.focus({ preventScroll: true });
  }
  prepare();
  if (chart >= 0) main.querySelectorAll("svg.chart")[chart]?.focus({ preventScroll: true });
  follow();
}

// What scrolls can be reached with the keyboard.
function prepare() {
  for (const element of document.querySelectorAll(".scroll, pre")) {
    const scrolls = element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1;
    if (scrolls) element.tabIndex = 0;
  }
  for (const chart of document.querySelectorAll("svg.chart[data-x]")) chart.tabIndex = 0;
}

function schedule() {
  if (timer) return;
  const wait = fetched + Math.max(PAUSE, 2 * duration) - performance.now();
  timer = setTimeout(refresh, Math.max(wait, 0));
}

async function refresh(isWanted = false) {
  clearTimeout(timer);
  timer = 0;
  const main = document.querySelector("main");
  fetched = performance.now();
  if (!isWanted && isInUse(main)) {
    schedule();
    return;
  }
  const address = location.href;
  try {
    const headers = isWanted ? {} : { "if-none-match": main.dataset.live };
    const response = await fetch(address, { headers, cache: "no-store" });
    if (response.status === 304) return;
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    if (address !== location.href) return; // it shows another range by now
    const fresh = page.querySelector("main");
    if ("live" in fresh.dataset) main.dataset.live = response.headers.get("etag") || "";
    else delete main.dataset.live;
    replace(main, fresh);
    if (!("live" in main.dataset)) watch(); // which ends the stream
  } catch (error) {
    if (isWanted) location.reload();
  } finally {
    duration = performance.now() - fetched;
  }
}

// Watch the page while it is visible. Browsers open six connections to a host, so hidden pages close theirs.
function watch() {
  if (stream) stream.close();
  stream = null;
  const main = document.querySelector("main[data-live]");
  if (!main || document.hidden) return;
  stream = new EventSource(location.href);
  stream.onmessage = (event) => {
    if (failures >= 3) show("", false);
    failures = 0;
    if (event.lastEventId !== main.dataset.live) schedule();
  };
  stream.onerror = () => {
    failures += 1;
    if (failures === 3) show("The board does not answer. This page shows the last numbers.", true);
    if (stream.readyState === EventSource.CLOSED) setTimeout(watch, RETRY);
  };
}

// The range of the curves is part of the URL; the server draws it with all its detail.
onZoom((range) => {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(range)) {
    if (value === null) url.searchParams.delete(name);
    else url.searchParams.set(name, value);
  }
  history.pushState(null, "", url);
  refresh(true).then(watch);
});

window.addEventListener("popstate", () => refresh(true).then(watch));
document.addEventListener("visibilitychange", watch);
prepare();
watch();
