"""The report's style sheet: reads in light and in dark, on paper, and on a narrow screen."""

CSS = """
:root{color-scheme:light dark;--line:#d5d9de;--soft:#f4f6f8;--dim:#57606a;
--ink:#1c2128;--back:#fff;--link:#1f5fa8}
@media (prefers-color-scheme:dark){:root{--line:#3a4048;--soft:#1f242b;--dim:#a3abb5;
--ink:#e6e9ed;--back:#14181d;
--link:#7ab3f0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:24px 20px 48px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0 0 12px}
h2{font-size:1.2rem;margin:36px 0 12px;border-bottom:1px solid var(--line);
padding-bottom:4px}h3{font-size:1rem;margin:20px 0 8px;overflow-wrap:anywhere}
h4{font-size:.95rem;margin:0 0 8px}
a{color:var(--link)}nav a{margin-right:16px}
dl{display:flex;flex-wrap:wrap;gap:8px 28px;margin:0 0 12px}dt{color:var(--dim);font-size:.8rem}
dd{margin:0;min-width:0;font-size:1.05rem;font-variant-numeric:tabular-nums}
.signs p{margin:6px 0;max-width:70ch}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(280px,1fr));gap:14px}
.charts svg{width:100%;height:auto;border:1px solid var(--line);border-radius:6px;padding:4px}
.pair{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:14px}
@media (max-width:720px){.pair{grid-template-columns:minmax(0,1fr)}}
article{border:1px solid var(--line);border-radius:6px;padding:12px;min-width:0;overflow-x:auto}
article table{border-collapse:collapse}article td{padding:4px 8px 4px 0}
article summary{color:var(--dim);font-size:.85rem;cursor:pointer;overflow-wrap:anywhere}
pre{font-family:ui-monospace,monospace}
.wide{overflow-x:auto}.wide svg{max-width:100%}
table.facts,table.events{border-collapse:collapse;font-size:.88rem}
table.facts th,table.facts td,table.events td{text-align:left;vertical-align:top;padding:3px 16px 3px 0;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}
table.facts th{font-weight:500;color:var(--dim);white-space:nowrap}
table.events td:first-child{white-space:nowrap}
table.events td:nth-child(2){min-width:11em}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.88rem}
details>summary{cursor:pointer;margin:8px 0}
footer{margin-top:40px;color:var(--dim);font-size:.85rem}
@media print{nav{display:none}body{max-width:none}article{break-inside:avoid}}
""".strip()
