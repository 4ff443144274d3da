// What the theme leaves unsaid to those who listen or use the keyboard alone.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelector("#__drawer")?.setAttribute("aria-label", "Navigation");
  document.querySelectorAll(".md-code__nav").forEach((nav, number) => nav.setAttribute("aria-label", `Code block ${number + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap, .md-sidebar__scrollwrap").forEach((one) => {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
  });
});
