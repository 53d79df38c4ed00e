// Before the first paint: the theme that was chosen here, or the system's.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("art-theme"); } catch { /* storage is switched off: the system's */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
