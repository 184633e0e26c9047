// Landmarks need names of their own: buttons that copy a block of code, lists of pages. The keyboard scrolls tables and
// code.
let lists = 0;
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => {
    const name = `Code ${index + 1}`;
    if (nav.ariaLabel !== name) nav.ariaLabel = name;
  });
  document.querySelectorAll("nav:not(.md-code__nav):not([data-named])").forEach((nav) => {
    const title = nav.querySelector(":scope > .md-nav__title")?.textContent.trim() ?? nav.ariaLabel ?? "Pages";
    nav.removeAttribute("aria-labelledby");
    nav.ariaLabel = `${title} ${++lists}`;
    nav.dataset.named = "true";
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex]), pre > code:not([tabindex])").forEach((wide) => {
    wide.tabIndex = 0;
  });
}).observe(document.body, { childList: true, subtree: true });
