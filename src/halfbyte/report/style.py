"""Style sheet of the report: one column, system fonts, colours as variables for light and dark pages."""

CSS = """
:root {
  color-scheme: light dark;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, monospace;
  --page: #fbfbf9; --card: #ffffff; --soft: #f1f1ed; --line: #e3e3de; --ink: #1b1d21; --muted: #62676e;
  --series-1: #2a63b8; --series-2: #c4570f; --good: #1c7a45; --bad: #b3261e;
  --trained: #d3ebda; --trained-ink: #0f4a29;
  --runtime: #9a9a94; --weights: #2a63b8; --adapters: #2a9d9d; --gradients: #5a9c3a;
  --optimizer: #d9a520; --activations: #8e5bb5; --logits: #c8503c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141518; --card: #1b1d21; --soft: #26292e; --line: #31343a; --ink: #e9e7e2; --muted: #9ba0a8;
    --series-1: #7fb0f2; --series-2: #f0a060; --good: #6ccb93; --bad: #f28b82;
    --trained: #1f4a33; --trained-ink: #bff0d2;
    --runtime: #70747a; --weights: #5b92de; --adapters: #3fb3b3; --gradients: #77b757;
    --optimizer: #d6ae45; --activations: #a985cf; --logits: #d9705e;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--sans);
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 80px; }
a { color: var(--series-1); text-decoration: none; }
a:hover { text-decoration: underline; }
h1 { margin: 2px 0 4px; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 0 0 16px; font-size: 21px; letter-spacing: -.01em; }
h3 { margin: 28px 0 8px; font-size: 16px; }
h4 { margin: 0 0 4px; font-size: 13px; font-weight: 500; color: var(--muted); }
section { margin-top: 52px; }
header p { margin: 0; color: var(--muted); overflow-wrap: anywhere; }
header .eyebrow { font-size: 13px; }
nav {
  display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 28px 0 0; padding: 12px 0;
  border: solid var(--line); border-width: 1px 0; font-size: 14px;
}
footer { margin-top: 60px; color: var(--muted); font-size: 13px; }

.note, .missing { color: var(--muted); font-size: 14px; }
.missing { font-style: italic; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.problems { margin: 24px 0 0; padding: 12px 16px 12px 34px; border: 1px solid var(--bad); border-radius: 10px; }
.problems, .plain { font-size: 14px; }
.plain { padding-left: 18px; }

.tiles {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(215px, 1fr)); gap: 12px; margin: 28px 0 0;
}
.tiles div, figure, article, pre.tokens, details pre {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
}
.tiles dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 2px 0 0; }
.tiles .figure { font-size: 23px; font-weight: 600; letter-spacing: -.02em; line-height: 1.3; }
.tiles .aside { color: var(--muted); font-size: 13px; line-height: 1.4; }

.figures, .beside {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 16px;
}
.beside { gap: 28px; align-items: start; }
.beside .scroll { margin: 0; }
figure { margin: 0; padding: 14px 14px 8px; }
figcaption { margin: 0 0 4px; font-size: 14px; font-weight: 600; }
figure .scroll { margin: 0 0 6px; max-height: 240px; overflow-y: auto; }
svg { display: block; width: 100%; height: auto; }

.scroll { overflow-x: auto; margin: 16px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td {
  text-align: left; vertical-align: top; padding: 7px 20px 7px 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere;
}
th { font-weight: 500; }
thead th { color: var(--muted); vertical-align: bottom; overflow-wrap: normal; }
tbody th { min-width: 6em; }
td b { font-weight: 600; }
td.number { white-space: nowrap; }

.bar { margin: 0 0 24px; }
.bar p { display: flex; justify-content: space-between; margin: 0 0 6px; font-size: 14px; }
.bar p span { color: var(--muted); }
.pieces { display: flex; gap: 2px; height: 30px; border-radius: 6px; overflow: hidden; background: var(--soft); }
.pieces i { flex: 0 1 auto; min-width: 2px; }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 0; padding: 0;
  color: var(--muted); font-size: 13px;
}
.legend b { color: var(--ink); font-weight: 500; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.runtime, .base { background: var(--runtime); }
.weights, .loading { background: var(--weights); }
.gathered { background: var(--weights); opacity: .6; }
.adapters { background: var(--adapters); }
.gradients { background: var(--gradients); }
.optimizer { background: var(--optimizer); }
.activations, .training { background: var(--activations); }
.logits { background: var(--logits); }

code, pre { font: 13px/1.55 var(--mono); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26em; overflow-y: auto; }
pre.tokens, article { margin: 0 0 12px; }
.tokens i { font-style: normal; color: var(--muted); }
.tokens b {
  padding: 1px 0; border-radius: 3px; background: var(--trained); color: var(--trained-ink); font-weight: 500;
  box-shadow: inset -1px 0 var(--card);
}
.note .tokens b, .note .tokens i { padding: 1px 6px; margin-right: 6px; font-size: 13px; }
.columns {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 240px), 1fr)); gap: 16px 24px;
  margin-top: 14px; padding-top: 14px; border-top: 1px solid var(--line);
}
.after h4 { color: var(--good); }
details summary { margin-bottom: 10px; color: var(--series-1); font-size: 14px; cursor: pointer; }

@media (max-width: 560px) {
  main { padding: 24px 16px 60px; }
  h1 { font-size: 25px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tiles div { padding: 10px 12px; }
  .tiles .figure { font-size: 18px; }
}
@media print {
  nav { display: none; }
  figure, article { break-inside: avoid; }
  pre { max-height: none; }
}
"""
