// The page of an audit: asks again until there is a report.
"use strict";
(() => {
  const again = async () => {
    const box = document.getElementById("audit");
    if (!box?.dataset.working) return;
    try {
      const answer = await fetch(box.dataset.working);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("audit");
      if (fresh) box.replaceWith(document.adoptNode(fresh));
    } catch { /* the server is away; the next time, then */ }
    setTimeout(again, 600);
  };
  setTimeout(again, 300);
})();
