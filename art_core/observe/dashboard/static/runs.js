// The page of all runs: selection, and rows that follow the store.
"use strict";
(() => {
  const form = document.getElementById("compare");
  const REFRESH = 3000;
  const body = () => document.getElementById("runs");

  if (form) {
    const bar = document.getElementById("chosen");
    const count = document.getElementById("chosen-count");
    const go = document.getElementById("go");
    const boxes = () => [...form.querySelectorAll("input[name=run]")];
    const told = () => {
      const chosen = boxes().filter((box) => box.checked).length;
      bar.hidden = chosen === 0;
      count.textContent = chosen === 1 ? "1 selected; one more to compare" : `${chosen} selected`;
      go.disabled = chosen < 2;
    };
    form.addEventListener("change", told);
    document.getElementById("none").addEventListener("click", () => {
      for (const box of boxes()) box.checked = false;
      told();
    });
    document.addEventListener("keydown", (event) => {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) && document.activeElement.type !== "checkbox";
      if (event.key === "c" && !typing && !event.ctrlKey && !event.metaKey && !go.disabled) form.requestSubmit(go);
    });
    told();
  }

  // Rows are replaced cell by cell where they differ, so that focus and selection stay where they are.
  const refresh = async () => {
    const answer = await fetch("/", { headers: { accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("runs");
    if (!fresh) return;
    if (!body()) return location.reload();
    const kept = [];
    for (const row of [...fresh.children]) {
      const old = document.getElementById(row.id);
      if (!old) { kept.push(document.adoptNode(row)); continue; }
      for (let i = 1; i < row.cells.length; i += 1) {
        const now = old.cells[i];
        if (now.dataset.was !== row.cells[i].innerHTML && !now.contains(document.activeElement)) {
          now.replaceChildren(...[...row.cells[i].childNodes].map((n) => document.importNode(n, true)));
          now.dataset.was = row.cells[i].innerHTML;
        }
      }
    }
    body().prepend(...kept);
    body().dispatchEvent(new CustomEvent("contentadded", { bubbles: true }));
  };
  const again = async () => {
    if (!document.hidden) {
      try { await refresh(); } catch { /* the server is away; the next time, then */ }
    }
    setTimeout(again, REFRESH);
  };
  setTimeout(again, REFRESH);
})();
