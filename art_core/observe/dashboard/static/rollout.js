// The page of a rollout that is still running: what it does appears as it is recorded.
//
// The server says when there is more; the page then fetches itself and takes over what has changed, and leaves
// alone what the reader is in: what was unfolded stays unfolded, and the focus where it is.
"use strict";
(() => {
  const running = document.querySelector("[data-live]");
  if (!running) return;
  const REPLACED = ["#facts", "#notices", "#way", "#rewards"];
  const connection = document.getElementById("connection");
  const was = new Map(); // by the id of an element: as the server last gave it
  let sign = running.dataset.sign;
  let source = null;
  let ended = false;

  const unfolded = (element) => [...element.querySelectorAll("details")].map((details) => details.open);
  const take = (old, fresh) => {
    const html = fresh.outerHTML;
    if (was.get(old.id) === html || old.contains(document.activeElement)) return;
    was.set(old.id, html);
    const open = unfolded(old);
    const now = document.importNode(fresh, true);
    old.replaceWith(now);
    now.querySelectorAll("details").forEach((details, n) => { if (open[n]) details.open = true; });
    now.dispatchEvent(new CustomEvent("contentadded", { bubbles: true }));
  };

  const refresh = async () => {
    const answer = await fetch(location.pathname + location.search);
    if (!answer.ok) throw new Error(`${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const place of REPLACED) {
      const [old, fresh] = [document.querySelector(place), page.querySelector(place)];
      if (old && fresh) take(old, fresh);
    }
    const [conversation, fresh] = [document.querySelector(".conversation"), page.querySelector(".conversation")];
    for (const old of [...conversation.children]) if (!old.id && old.tagName !== "H2") old.remove(); // where to go on, and "nothing yet"
    let last = conversation.firstElementChild;
    for (const child of [...fresh.children].slice(1)) {
      const old = child.id && document.getElementById(child.id);
      if (old) take(old, child);
      else last.after(document.importNode(child, true));
      const placed = old ? document.getElementById(child.id) : last.nextElementSibling;
      if (!old) { was.set(child.id, child.outerHTML); placed.dispatchEvent(new CustomEvent("contentadded", { bubbles: true })); }
      last = placed;
    }
    ended = !page.querySelector("[data-live]");
  };

  const onChange = async (message) => {
    const status = JSON.parse(message.data).status;
    try {
      await refresh();
      sign = message.lastEventId;
      connection.textContent = "";
    } catch {
      connection.textContent = "no connection; trying again";
      stop();
      setTimeout(follow, 2000);
      return;
    }
    if (ended || status !== "running") stop();
  };
  const follow = () => {
    if (source || ended || document.hidden) return;
    source = new EventSource(`${running.dataset.live}?${new URLSearchParams({ after: sign })}`);
    source.addEventListener("open", () => { connection.textContent = ""; });
    source.addEventListener("change", onChange);
    source.addEventListener("error", () => {
      connection.textContent = "no connection; trying again";
      if (source?.readyState === EventSource.CLOSED) { stop(); setTimeout(follow, 2000); }
    });
  };
  const stop = () => { source?.close(); source = null; };
  // A browser keeps few connections to one server: those of pages that nobody sees are given back.
  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else follow(); });
  follow();
})();
