"""The style of the report: light or dark as the reader's system is, and narrow enough for a phone."""

CSS = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --text: #1d2126; --quiet: #62686f; --line: #e2e3e1;
  --better: #00714f; --worse: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --text: #e7e9ea; --quiet: #a0a7ad;
  --line: #343a40; --better: #4cc79e; --worse: #ff9560; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 16px 64px; }
header { border-bottom: 3px solid var(--text); padding-bottom: 12px; }
.kind { margin: 0; color: var(--quiet); }
h1 { margin: 0; font-size: clamp(1.4rem, 4.5vw, 2.1rem); line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 40px 0 10px; font-size: 1.25rem; }
.findings { margin: 0; padding-left: 1.2em; max-width: 88ch; }
.findings li { margin: 6px 0; overflow-wrap: anywhere; }
.findings li:first-child { list-style: none; margin-left: -1.2em; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 9px; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .left { text-align: left; }
thead th { color: var(--quiet); font-weight: 500; border-bottom: 1px solid var(--line); white-space: normal;
  vertical-align: bottom; line-height: 1.25; }
tbody td { border-top: 1px solid var(--line); }
.block th { padding-top: 14px; border-top: 2px solid var(--line); font-weight: 650; }
tbody tr.block:first-child th { border-top: 0; }
.chip { display: inline-block; width: 0.75em; height: 0.75em; border-radius: 50%; margin-right: 0.5em; }
.long { white-space: normal; min-width: 11em; }
.better { color: var(--better); font-weight: 650; }
.worse { color: var(--worse); font-weight: 650; }
.quiet { color: var(--quiet); }
.note, figcaption { color: var(--quiet); font-size: 0.85rem; max-width: 95ch; margin: 8px 0 0;
  overflow-wrap: anywhere; }
figure { margin: 0; }
section > .note + figure { margin-top: 22px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 8px; font-size: 0.9rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); gap: 12px;
  align-items: start; }
.panels.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px; min-width: 0; }
.panel svg { display: block; width: 100%; max-width: 560px; height: auto; margin: 0 auto; }
pre { margin: 0; padding: 12px 14px; font: 0.85rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
details { margin: 12px 0; }
summary { cursor: pointer; padding: 4px 0; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 18px; margin: 14px 0 0;
  font-size: 0.9rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
