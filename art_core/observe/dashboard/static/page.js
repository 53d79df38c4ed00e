// What every page does: theme, keys, times in the reader's zone, filters of lists.
//
// Lists: an element with `data-list` holds items with `data-item`; j and k move the focus between the items'
// first links. A search field with `data-filter="<selector of the list>"` hides items that lack its words.
// `data-up` on a link says what the page is part of. Others listen to the event "themechange" of document.
"use strict";
(() => {
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");

  // -- theme -----------------------------------------------------------------------------------------
  const themeButton = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
  const tellTheme = () => {
    themeButton.textContent = { light: "Light", dark: "Dark" }[root.dataset.theme] ?? "Auto";
    themeButton.setAttribute("aria-label", `Theme: ${themeButton.textContent.toLowerCase()}; change it`);
    document.dispatchEvent(new CustomEvent("themechange", { detail: { dark: isDark() } }));
  };
  const turnTheme = () => {
    const next = { light: "dark", dark: null }[root.dataset.theme ?? ""];
    const chosen = next === undefined ? "light" : next;
    if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme;
    try {
      if (chosen) localStorage.setItem("art-theme", chosen); else localStorage.removeItem("art-theme");
    } catch { /* not kept, then */ }
    tellTheme();
  };
  themeButton.addEventListener("click", turnTheme);
  systemDark.addEventListener("change", tellTheme);
  tellTheme();

  // -- help ------------------------------------------------------------------------------------------
  const help = document.getElementById("help");
  document.getElementById("keys").addEventListener("click", () => help.showModal());

  // -- times -----------------------------------------------------------------------------------------
  const showTimes = (within) => {
    for (const time of within.querySelectorAll("time[datetime]")) {
      const date = new Date(time.dateTime);
      if (time.dataset.local || Number.isNaN(date.valueOf())) continue;
      time.dataset.local = "yes";
      time.title = date.toLocaleString();
      if (time.hasAttribute("data-ago")) continue;
      const today = date.toDateString() === new Date().toDateString();
      time.textContent = today
        ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" })
        : date.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
    }
  };
  showTimes(document);
  document.addEventListener("contentadded", (event) => showTimes(event.target));

  // -- lists -----------------------------------------------------------------------------------------
  const items = () => [...document.querySelectorAll("[data-list] [data-item]")].filter((i) => i.offsetParent);
  const target = (item) => item.querySelector("a[href]") ?? item;
  const move = (by) => {
    const all = items();
    if (!all.length) return;
    const now = all.findIndex((item) => item.contains(document.activeElement));
    const next = now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + by));
    const link = target(all[next]);
    link.focus();
    all[next].scrollIntoView({ block: "nearest" });
  };
  const select = () => {
    const item = items().find((i) => i.contains(document.activeElement));
    item?.querySelector("input[type=checkbox]")?.click();
  };
  for (const field of document.querySelectorAll("input[data-filter]")) {
    const list = document.querySelector(field.dataset.filter);
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const item of list.querySelectorAll("[data-item]")) {
        const text = item.textContent.toLowerCase();
        item.hidden = !words.every((word) => text.includes(word));
        left += item.hidden ? 0 : 1;
      }
      const told = document.querySelector(`[data-count="${field.dataset.filter}"]`);
      if (told) told.textContent = words.length ? `${left} match` : "";
    };
    field.addEventListener("input", apply);
    if (field.value) apply();
  }

  // -- keys ------------------------------------------------------------------------------------------
  const typing = (e) => e.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(e.tagName);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const field = document.activeElement;
    if (typing(field) && field.type !== "checkbox") {
      if (event.key === "Escape") field.blur();
      return;
    }
    const acts = {
      "/": () => document.querySelector("input[type=search]")?.focus(),
      "?": () => help.showModal(),
      j: () => move(1),
      k: () => move(-1),
      x: select,
      t: turnTheme,
      u: () => document.querySelector("a[data-up]")?.click(),
    };
    const act = acts[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
})();
