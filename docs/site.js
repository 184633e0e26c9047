// Each button that copies a block of code is in a landmark, which needs a name of its own; the keyboard scrolls tables.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => {
    const name = `Code ${index + 1}`;
    if (nav.ariaLabel !== name) nav.ariaLabel = name;
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((table) => {
    table.tabIndex = 0;
  });
}).observe(document.body, { childList: true, subtree: true });
