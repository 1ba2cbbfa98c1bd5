"""How the page looks, and the few lines that keep it up to date. Nothing is fetched from anywhere else."""

from __future__ import annotations

from typing import Final

__all__ = ["SCRIPT", "STYLE"]

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --bad: #c22; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --bad: #f77; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h1 small { font-weight: normal; overflow-wrap: anywhere; }
h2 { font-size: .95rem; margin: 1.4rem 0 .4rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { background: var(--soft); border-radius: .5rem; flex: 1 1 10rem; padding: .7rem .9rem; }
.card h2 { font-weight: normal; margin: 0; opacity: .75; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.card small { overflow-wrap: anywhere; }
svg { display: block; max-width: 100%; } path { fill: none; stroke: currentColor; stroke-width: 1.5; }
#workers, #events { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; unicode-bidi: isolate; white-space: pre-wrap; font-variant-numeric: tabular-nums; }
dl { display: grid; gap: .1rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
dl div { border-bottom: 1px solid var(--line); display: flex; font-size: .87rem; justify-content: space-between; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); } .note { opacity: .8; } p span { white-space: pre-wrap; }
.links { margin-top: 2rem; font-size: .87rem; }
"""

SCRIPT: Final = """
const away = document.getElementById("away");
function listen() {
  const source = new EventSource("changes");
  source.onmessage = (message) => {
    away.hidden = true;
    for (const [id, text] of Object.entries(JSON.parse(message.data))) {
      document.getElementById(id).innerHTML = text;
    }
  };
  source.onerror = () => {
    away.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  };
}
listen();
"""
