"use strict";

/* What belongs to the window and not to a conversation: colour theme, marking of sources, the panel on small
   screens, and following the end of the text. */

/** A choice that outlives the tab; where the browser stores nothing, it lasts as long as the page. */
const remembered = {
  get(name) {
    try {
      return localStorage.getItem(`outrider.${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(`outrider.${name}`);
      else localStorage.setItem(`outrider.${name}`, value);
    } catch {
      // private windows of some browsers
    }
  },
};

/** Light or dark, as the system says until the other one is chosen; to choose the system's own again takes the
    choice back. */
function setUpTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const systems = () => (dark.matches ? "dark" : "light");
  let chosen = remembered.get("theme");
  const shown = () => (["light", "dark"].includes(chosen) ? chosen : systems());
  const other = () => (shown() === "dark" ? "light" : "dark");
  const show = () => {
    document.documentElement.dataset.theme = shown();
    byId("theme-name").textContent = other() === "dark" ? "Dark theme" : "Light theme";
  };
  byId("theme").addEventListener("click", () => {
    chosen = other() === systems() ? null : other();
    remembered.set("theme", chosen);
    show();
  });
  dark.addEventListener("change", show);
  show();
}

function setUpColours() {
  const box = byId("colours");
  box.checked = remembered.get("colours") !== "off";
  const show = () => {
    document.body.classList.toggle("marked", box.checked);
    remembered.set("colours", box.checked ? "on" : "off");
  };
  box.addEventListener("change", show);
  show();
}

function setUpPanel() {
  const opener = byId("panel-button");
  opener.addEventListener("click", () => {
    const isOpen = opener.getAttribute("aria-expanded") === "true";
    showPanel(!isOpen);
    if (!isOpen) byId("panel").focus({ focusVisible: false }); // no frame around all of it
  });
}

/** Open or close the panel where it does not stand beside the conversation anyway. */
function showPanel(isOpen) {
  byId("panel-button").setAttribute("aria-expanded", String(isOpen));
  byId("panel").classList.toggle("open", isOpen);
}

function closePanel() {
  const isOpen = byId("panel").classList.contains("open");
  showPanel(false);
  if (isOpen && byId("panel-button").offsetParent) byId("panel-button").focus();
}

/** Keeps the end of a growing text in sight, until the reader scrolls away from it. */
class Follower {
  constructor(scroller, opener) {
    this.scroller = scroller;
    this.opener = opener;
    this.isFollowing = true;
    scroller.addEventListener("scroll", () => this.look(), { passive: true });
    opener.addEventListener("click", () => {
      this.toEnd();
      byId("prompt").focus();
    });
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  look() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.isFollowing = scrollHeight - scrollTop - clientHeight < 60;
    this.opener.hidden = this.isFollowing;
  }

  follow() {
    if (this.isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.opener.hidden = false;
  }

  toEnd() {
    this.isFollowing = true;
    this.opener.hidden = true;
    this.follow();
  }
}
