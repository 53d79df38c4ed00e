// Trajectories: parts that are fetched when somebody asks, tokens by keys, feedback.
//
// `<details data-load="...">` fetches its contents when it is opened; a link with `data-part` replaces what
// holds it (`data-holds-part`, or the element that `data-into` selects). Parts are asked for with a header,
// and are whole pages without this script.
"use strict";
(() => {
  const fetchPart = async (address) => {
    const answer = await fetch(address, { headers: { "X-ART-Part": "1" } });
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    return answer.text();
  };
  const failed = (error) => {
    const told = document.createElement("p");
    told.className = "notice bad";
    told.setAttribute("role", "alert");
    told.textContent = `This part could not be fetched: ${error.message}. Is the dashboard still running?`;
    return told;
  };
  const added = (element) => element.dispatchEvent(new CustomEvent("contentadded", { bubbles: true }));

  // -- parts -----------------------------------------------------------------------------------------
  document.addEventListener("toggle", async (event) => {
    const details = event.target;
    if (!details.open || !details.dataset?.load || details.dataset.loaded) return;
    details.dataset.loaded = "yes";
    details.setAttribute("aria-busy", "true");
    for (const child of [...details.children]) if (child.tagName !== "SUMMARY") child.remove();
    const holder = document.createElement("div");
    details.append(holder);
    try {
      holder.innerHTML = await fetchPart(details.dataset.load);
    } catch (error) {
      delete details.dataset.loaded;
      holder.replaceChildren(failed(error));
    }
    details.removeAttribute("aria-busy");
    added(holder);
  }, true);

  document.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-part]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const into = link.dataset.into ? document.querySelector(link.dataset.into) : null;
    const holder = into ?? link.closest("[data-holds-part]");
    holder.setAttribute("aria-busy", "true");
    try {
      const part = await fetchPart(link.getAttribute("href"));
      if (into || holder.classList.contains("prose")) {
        holder.innerHTML = part;
        holder.removeAttribute("aria-busy");
        holder.setAttribute("tabindex", "-1");
        holder.focus({ preventScroll: !into });
        added(holder);
      } else {
        const around = holder.parentElement;
        holder.outerHTML = part;
        around.querySelector(".tokens")?.focus({ preventScroll: true });
        added(around);
      }
      for (const other of document.querySelectorAll(`a[data-into="${link.dataset.into}"].on`)) other.classList.remove("on");
      if (into) link.classList.add("on");
    } catch (error) {
      holder.removeAttribute("aria-busy");
      holder.append(failed(error));
    }
  });

  // -- tokens ----------------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-colour-by]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const part = link.closest(".tokens-part");
    part.dataset.colour = link.dataset.colourBy;
    for (const other of part.querySelectorAll("a[data-colour-by]")) {
      const on = other === link;
      other.classList.toggle("on", on);
      if (on) other.setAttribute("aria-current", "true"); else other.removeAttribute("aria-current");
    }
    for (const paged of part.querySelectorAll("a[data-part]")) {
      paged.href = paged.getAttribute("href").replace(/colour=\w+/, `colour=${part.dataset.colour}`);
    }
  });

  const point = (token) => {
    const tokens = token.closest(".tokens");
    tokens.querySelector(".now")?.classList.remove("now");
    token.classList.add("now");
    const told = tokens.parentElement.querySelector(".told");
    if (told) told.textContent = token.title;
  };
  document.addEventListener("keydown", (event) => {
    const tokens = document.activeElement;
    if (!tokens?.classList.contains("tokens")) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const all = tokens.children;
    if (by === undefined && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const now = [...all].findIndex((t) => t.classList.contains("now"));
    const last = all.length - 1;
    const next = event.key === "Home" ? 0 : event.key === "End" ? last : Math.max(0, Math.min(last, now + by));
    if (!all[next]) return;
    point(all[next]);
    all[next].scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".tokens > .tok");
    if (token) point(token);
  });

  // -- where the reader is, on the graph ---------------------------------------------------------------
  const nodes = document.querySelectorAll(".graph a[data-visits]");
  if (nodes.length && "IntersectionObserver" in window) {
    const seen = new Set();
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const number = entry.target.id.slice("visit-".length);
        if (entry.isIntersecting) seen.add(number); else seen.delete(number);
      }
      for (const node of nodes) node.classList.toggle("here", node.dataset.visits.split(" ").some((n) => seen.has(n)));
    }, { rootMargin: "-30% 0px -50% 0px" });
    for (const visit of document.querySelectorAll(".visit")) watch.observe(visit);
  }
  // A node that was visited several times leads to the next of its visits each time.
  for (const node of nodes) {
    const visits = node.dataset.visits.split(" ");
    let at = -1;
    node.addEventListener("click", (event) => {
      at = (at + 1) % visits.length;
      const target = document.getElementById(`visit-${visits[at]}`);
      if (!target) return;
      event.preventDefault();
      location.hash = target.id;
    });
  }

  // -- feedback --------------------------------------------------------------------------------------
  const remembered = () => { try { return localStorage.getItem("art-author") ?? ""; } catch { return ""; } };
  for (const field of document.querySelectorAll("form[data-feedback] [name=author]")) field.value ||= remembered();
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.dataset?.feedback) return;
    event.preventDefault();
    const told = form.querySelector(".said");
    const tell = (text, bad) => { told.textContent = text; told.classList.toggle("bad", bad); };
    const values = Object.fromEntries(new FormData(form, event.submitter));
    const [kind, value] = (values.kind ?? "").split(":");
    const body = { ...values, kind, value: value ?? values.score };
    if (body.value === "" || body.value === undefined) return tell("Give a score from 0 to 1.", true);
    delete body.score;
    try {
      const answer = await fetch(form.dataset.feedback, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-ART-Control": form.dataset.token },
        body: JSON.stringify({ ...body, value: Number(body.value) }),
      });
      const said = await answer.json();
      if (!answer.ok) return tell(Object.values(said.errors).join("; "), true);
      try { localStorage.setItem("art-author", values.author); } catch { /* not kept, then */ }
      tell(said.said, false);
      form.querySelector("textarea")?.form.reset();
      for (const field of form.querySelectorAll("[name=author]")) field.value = values.author;
      const list = document.querySelector("[data-feedback-list]");
      if (list) {
        const item = document.createElement("li");
        item.textContent = said.said;
        list.querySelector("[data-none]")?.remove();
        list.prepend(item);
      }
    } catch (error) {
      tell(`Not kept: ${error.message}`, true);
    }
  });
})();
